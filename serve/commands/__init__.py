"""The commands that use a model: run, serve, compile, explain, and those about their results."""
