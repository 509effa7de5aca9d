"""The command line, the HTTP server, and how they print what the engine reports.

``cli`` is the list of commands, a file each in ``commands/`` and ``measure/``; nothing here imports
torch before a command runs.
"""
