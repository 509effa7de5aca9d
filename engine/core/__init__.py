"""The scheduler, KV blocks and prefix cache: plain Python, without torch and without text."""
