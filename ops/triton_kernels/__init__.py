"""Triton kernels of the semantic ops; imported lazily, so that a start without them pays nothing."""
