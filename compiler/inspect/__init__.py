"""These modules inspect a build: ``explain`` and ``diff``, ``bisect``, and ``dump`` for ``--dump``.

Nothing that compiles or runs imports this room, so no source of it is in an artifact's key.
"""
