"""The merge methods, one file for each family: a function, and under it its declaration, parameters included.

A method is a function of deltas; it opens no file. Start at `recipe.py`; `parameter.py` has what several methods take.
To add one, write a file here with a `METHODS` tuple and name it in `../registry.py`: nothing else is to be changed.
"""
