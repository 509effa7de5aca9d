"""Linear layers, their kernels and the chains that join them."""
