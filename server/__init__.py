"""What runs on the server: intake, merging, evaluation.

It may read every byte that it receives, and trusts none. Start at `app.py`; a merge from files starts
at `merge_job.py`.
"""
