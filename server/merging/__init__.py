"""Merge methods, one file per family, and the registry that names them.

`deltas.read_adapter` or `deltas.adapter_from_files` → `merge.merge` → `merge.as_release`.
"""
