"""Quantized weights of captured models.

``formats`` says which layers can be quantized, ``stored`` gathers the tensors that a checkpoint has
for one weight, ``scales`` moves scales as their weights move, and ``load`` fills the layers.
"""
