"""Benchmarks of single ops, one module a family, each `python -m` runnable."""
