"""What goes over the wire and lies on disk between the parties: its files, signatures and receipts.

It checks form and signature, never the meaning of weights. Start at `format.py`.
"""
