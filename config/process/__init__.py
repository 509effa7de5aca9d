"""A process sets up its log here, and decides when it collects garbage."""
