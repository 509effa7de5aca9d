"""The shards of captured models: ``spread`` has tensors that say which part of them a rank holds,
``rules`` what ops make of such parts, ``plan`` which parameters are split so that all ops work."""
