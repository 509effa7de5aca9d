"""Models that have no adapter, built from their unmodified implementation in ``transformers``.

``library`` builds one on the meta device; ``interfaces`` stands in for the library's attention and
masks, so that those arrive as semantic ops; ``read`` finds out what a model needs, ``model`` runs
it.  ``transformers`` is imported when such a folder is read, and by nothing else.
"""
