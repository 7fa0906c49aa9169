"""The low-dimensional coordinates in which a party trains, and the public directions that span them.

It sees public gradients only. Start at `coordinates.py`.
"""
