"""Models that have no adapter, built from their unmodified implementation in ``transformers``.

``library`` builds one on the meta device; ``interfaces`` stands in for the library's attention,
masks and experts, so that those arrive as semantic ops; ``read`` finds out what a model needs,
``model`` runs it.  ``shrink`` and ``twin`` make a small model of the same kind, which is compared
with the unmodified one.  ``transformers`` is imported when such a folder is read, and by nothing
else.  ``described`` and ``skeleton`` keep in an artifact what a later start needs of all this, so
that it does without.
"""
