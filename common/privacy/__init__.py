"""What one training costs: the mechanism, its accounting, and the noise for a budget.

Pure arithmetic on public numbers: no record and no random number comes here. Start at `mechanism.py`, then
`accounting.py`.
"""
