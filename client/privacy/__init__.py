"""Clipping, noise and sampling: the only code between a record's gradient and anything that leaves.

It knows no model and no file. Start at `privatiser.py`; noise is drawn in `noise.py`, batches in `sampling.py`.
"""
