"""Models that are no Hugging Face folder on this machine: a name on the Hub or a GGUF file becomes
one.  ``model_folder`` (``hf_config.py``) calls this room, and nothing else knows of it."""
