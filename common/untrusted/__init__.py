"""Reading what somebody else wrote: bounded, typed, never followed and never run.

Files, JSON and texts from outside enter only here. It knows no format of ours. Start at `parsing.py`.
"""
