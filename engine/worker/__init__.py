"""The device side, one a GPU: start-up, runner and sampler."""
