"""Norms, gated activations and quantization: what stands between linear layers."""
