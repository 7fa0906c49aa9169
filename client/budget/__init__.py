"""What a data set has already spent: the ledger, the site's policy, and their composition.

A charge is durable here before a record is read. Start at `ledger.py`.
"""
