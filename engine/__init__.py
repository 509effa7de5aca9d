"""The engine takes requests and gives tokens: the scheduler, the runner and the loop between them.

A request passes ``inputs`` (prompt -> token ids), ``scheduler`` (-> ``batch``), ``runner`` (->
sampled tokens) and ``output_processor`` (-> text, stop strings); ``loop`` keeps one step in flight.
Only the runner's side knows torch.
"""
