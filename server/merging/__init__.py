"""Merge methods, one file per family, and the registry that names them.

`read_adapter` or `adapter_from_files` → `merge` → `as_release`.
"""

from dpmerge.server.merging.deltas import Adapter, adapter_from_files, read_adapter
from dpmerge.server.merging.merge import Merged, as_release, merge
from dpmerge.server.merging.registry import METHODS

__all__ = ["METHODS", "Adapter", "Merged", "adapter_from_files", "as_release", "merge", "read_adapter"]
