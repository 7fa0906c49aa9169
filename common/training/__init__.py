"""Optimisers and alignment terms that act on what is already private.

Nothing here sees a record or a gradient of one. Start at `optimizer.py`.
"""
