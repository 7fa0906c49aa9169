"""What a merge is asked for: one frozen `MergeSpec`, however it was written down, and what is refused of it.

No adapter is read here and nothing is merged. Start at `spec.py`; a federation file's `[merge]` is `federation.py`.
"""
