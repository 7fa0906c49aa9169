"""The merge methods, one file for each family.

A method is a function of deltas; it opens no file. Start at `recipe.py`; to add one, write a file here and name it in
`../registry.py`.
"""
