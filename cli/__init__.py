"""The command line: `dpmerge`, its terminal and its tables.

It decides nothing that a caller from Python could not have. Start at `main.py`; every command has a file
in `commands/`.
"""
