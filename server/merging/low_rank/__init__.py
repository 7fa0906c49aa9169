"""Linear algebra on low-rank products that never builds the full matrix.

It knows no adapter and no method. Start at `algebra.py`.
"""
