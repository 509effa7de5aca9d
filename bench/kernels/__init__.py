"""One pytest-benchmark file a kernel, over the real shapes of three models; ``make bench``."""
