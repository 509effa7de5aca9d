"""A rewritten graph is split at attention, and each semantic op gets the implementation it runs.

The rewriting itself is the passes' (``passes/``); here kernels are chosen, and at ``-O3`` measured.
"""
