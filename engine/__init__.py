"""Requests in, tokens out: the scheduler, the runner and the loop between them.

A request passes ``inputs`` (prompt -> token ids), ``scheduler`` (-> ``batch``), the runner (-> sampled
tokens), ``output_processor`` (-> text, stop strings); ``loop`` keeps one step in flight.  Everything
here but the runner is plain Python without torch.
"""
