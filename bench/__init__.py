"""Benchmarks: a kernel, a pass and end to end; figures go to results/."""
