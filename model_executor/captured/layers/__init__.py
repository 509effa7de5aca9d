"""Which layers of a captured model compute the same, and how one of each kind is traced."""
