"""The command line, the HTTP server (``http/``), and how they print what the engine reports.

``cli`` is the list of commands, a file each; nothing here imports torch before a command runs.
"""
