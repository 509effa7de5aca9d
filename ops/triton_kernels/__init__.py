"""Triton kernels of the semantic ops; imported lazily: a start without them pays nothing."""
