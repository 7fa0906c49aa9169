"""One file for each command.

A command reads options, calls one function, and prints. To add one, write a file here and name it in `../main.py`.
"""
