"""Writes the device table of a GPU: ``python -m fusewright.bench.ops.tune_linear``."""
