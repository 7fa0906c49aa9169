"""What client and server must agree on.

Formats, settings, the mechanism and its accounting, the shared model: one room for each. Nothing here knows a client
or a server. Start at `errors.py`, then at the room that the question names.
"""
