"""Regions become a plan and code: distinct pieces as Python modules, kernels as binaries.

Only a build comes here; what the code needs when it runs is in ``run``.
"""
