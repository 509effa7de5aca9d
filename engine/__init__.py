"""The engine takes requests and gives tokens.

A request passes ``frontend`` (prompt -> token ids), ``core`` (scheduler -> one step's batch),
``worker`` (-> sampled tokens) and ``frontend`` again (-> text, stop strings).  The modules beside
these rooms put them together: ``Engine`` in one process, ``LLM`` and ``AsyncLLM`` on top of it.
"""
