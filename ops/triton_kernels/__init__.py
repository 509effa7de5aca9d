"""Device code of the Triton kernels, and nothing else: only compiling or interpreting imports it.

``ops/launches`` has the host side, one file for one file.
"""
