"""The privacy loss of queries as a distribution: of one query, of many together, and the ε that it gives.

Numbers in, numbers out: what a mechanism is and what is claimed of it stays above. Start at `composition.py`, then
`loss_distribution.py`.
"""
