"""One file for each command.

A command reads options, calls one function, and prints. To add one, write a file with an `app` here and name it in
`COMMANDS` of `../main.py`. What takes seconds to import, such as torch, is best imported inside the command, so that
its own --help and its refusals come at once. Start at `report.py`, the shortest.
"""
