"""Benchmarks that only developers run, from a checkout: no wheel has them.

Each module runs as ``python -m fusewright.benchmarks.NAME``.  ``evidence`` measures what the
documents show and ``report`` renders it; ``ops`` times single ops, ``peers`` other engines.
"""
