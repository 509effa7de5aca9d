"""The same work through the Python API of vLLM, of SGLang and of this package."""
