"""These modules inspect a build: ``explain`` and ``diff``, ``limits``, ``bisect``, and ``dump``.

Nothing that compiles or runs imports this room, so no source of it is in an artifact's key.
"""
