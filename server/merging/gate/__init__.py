"""Which adapters may be merged with each other, and with which base model.

It computes no merge. Start at `gate.py`.
"""
