"""From an upload to a receipt: every check, then the spool, then the answer.

A check of a release is added in `validation.py`. Nothing is merged here. Start at `reception.py`.
"""
