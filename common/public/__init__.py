"""Public data that may shape a training: the shared text and the terms under which it is used.

No private record comes here. Start at `corpus.py`.
"""
