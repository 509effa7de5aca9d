"""The HTTP server: OpenAI's API and Anthropic's over an engine in a process of its own.

Bytes become a checked body (``intake``); an endpoint (``endpoints``) makes prompts and
``SamplingParams`` of it and submits them as a job (``jobs``), whose outputs come back as one answer
or as server-sent events.  ``calls`` finds the calls of tools in them.  ``life`` starts and drains
the whole.
"""
