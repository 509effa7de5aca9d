"""Attention over the paged KV cache, rotary embeddings and the stores of keys and values."""
