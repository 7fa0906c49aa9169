"""Many adapters into one: `merge.py` runs a method, `registry.py` names them all.

A method is added in `methods/`. Nothing here knows a key or reads a record.
Start at `adapters.deltas.read_adapter` → `merge.merge` → `merge.as_release`.
"""
