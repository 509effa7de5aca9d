"""Host side of the Triton kernels: from an op's arguments to ``Launch``es as data.

Grids, tiles and outputs follow from shapes alone, so all of it works on meta tensors.  Nothing here
imports Triton; the device code is in ``ops/triton_kernels``, one file for one file.
"""
