"""Models: Hugging Face configs and checkpoints in, modules that call semantic ops out."""
