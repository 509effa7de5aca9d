"""Model in, program out: ``compile()`` finds a program's artifact or has ``build()`` make it.

Both are here, in ``compiled`` and ``build``: ordered lists of calls into the rooms of the line,
``capture``, ``lowering``, ``emit``, ``artifacts`` and ``run``.  A captured graph is rewritten by
the passes, split at attention, lowered to implementations, and its distinct pieces are compiled
once; the plan says which piece runs with which values.  All of it is kept as an artifact, and a
program is always loaded from one.  ``inspect`` looks on; ``dynamo_backend`` is the other door, that
of ``torch.compile``.

Nothing is imported here: keys and stores (``artifacts.key``, ``.artifact``, ``.store``) need no
torch, a warm start no passes.
"""
