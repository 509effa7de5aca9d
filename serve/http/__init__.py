"""The HTTP server: OpenAI's API over an engine in a process of its own.

A body becomes a pydantic model (``protocol``), that becomes prompts and ``SamplingParams``
(``completions``, ``chat``), those go to the engine (``state``), and its outputs come back as one
answer or as server-sent events (``events``).  ``life`` starts and drains the whole.
"""
