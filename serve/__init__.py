"""The command line (and later the server): flags in, one ``LLM`` driven, text or JSON out.

``cli`` is the list of commands, a file each; nothing here imports torch before a command runs.
"""
