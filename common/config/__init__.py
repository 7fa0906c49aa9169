"""The federation file: its sections, their bounds, and the plan that is made of them.

No setting is read anywhere else, and nothing here opens a record or a model. Start at `federation.py`.
"""
