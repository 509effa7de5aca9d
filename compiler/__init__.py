"""The compiler turns a model into a program.

``compile()`` finds a program's artifact or has ``build()`` make it.  Both, in ``compiled`` and
``build``, are ordered lists of calls into the rooms of the line: ``capture``, ``lowering``,
``emit``, ``artifacts`` and ``run``.  A captured graph is rewritten by the passes, split at
attention, lowered to implementations, and its distinct pieces are compiled once; the plan says
which piece runs with which values.  All of it is kept as an artifact, and a program is always
loaded from one.  ``inspect`` looks on; ``dynamo_backend`` serves ``torch.compile``.

Nothing is imported here: keys and stores (``artifacts.key``, ``.artifact``, ``.store``) need no
torch, and a warm start needs no passes.
"""
