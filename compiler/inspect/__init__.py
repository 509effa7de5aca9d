"""What looks on: ``explain`` and the difference of two, ``bisect``, ``--dump``.

Nothing that compiles or runs imports this room, so no source of it is in an artifact's key.
"""
