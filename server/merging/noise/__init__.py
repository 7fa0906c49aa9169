"""How much of an adapter is the noise of its privacy, from its statement alone.

Nothing is averaged here. Start at `shares.py`.
"""
