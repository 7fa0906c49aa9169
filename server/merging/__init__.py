"""Merge methods, one file per family, and the registry that names them."""
