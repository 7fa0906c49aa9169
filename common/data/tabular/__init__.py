"""Reading a party's records one by one: what one record is, what it may cost, and what becomes of a broken one.

Nothing here knows labels or tasks. Start at `rows.py` for the vocabulary and the bounds; `cells.py` compares cells, the
other files read one family of formats each.
"""
