"""Reading a party's records one by one: what one record is, what it may cost, and what becomes of a broken one.

`rows.py` has the vocabulary and the bounds, `cells.py` compares cells, the other files read one family of formats each.
"""
