"""A release's privacy statement: how it is made, read, verified and shown.

Every number in it comes from the mechanism that ran. Start at `statement.py`, then `verify.py`.
"""
