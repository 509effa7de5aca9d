"""Grammars of structured output, compiled and turned into masks in processes of their own.

A process that may die, hang or grow is the only place where what clients send reaches llguidance.
``checks`` tries a grammar before its request is queued, ``matchers`` keeps the states of outputs
that run and their masks; each has a ``HelperProcess``, which runs ``program``.
"""
