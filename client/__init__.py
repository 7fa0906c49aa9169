"""What runs beside the private records: private fine-tuning, and one release.

Nothing here is imported by the server. Start at `party/party.py`; noise is drawn in `privacy/noise.py`.
"""
