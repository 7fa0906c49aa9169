"""One party from its records to its outbox.

It puts the other rooms together and computes no gradient and no noise itself. Start at `party.py`.
"""
