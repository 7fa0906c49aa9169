"""Data sets: fetching and checking public ones, reading records one by one, tasks and their labels.

It reads records and trains nothing. Start at `tasks.py` for the names, at `records.py` for a party's own file.
"""
