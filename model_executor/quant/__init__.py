"""Quantized weights.  ``scheme`` says how a model is quantized, ``hf_quant`` reads that from a
config, ``scales`` reads the scales beside FP8 weights, ``quantize`` makes both from other weights.

Nothing here imports layers or models: ``layer`` says what this room needs of a layer.
"""
