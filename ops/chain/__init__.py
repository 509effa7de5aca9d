"""Chains: linear layers and what stands between them, as data.

``stages`` says what a chain can consist of, ``chain`` is the op, and ``kernels`` has the table of
kernels that compute several stages at once.
"""
