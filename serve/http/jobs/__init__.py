"""What runs: open jobs, what the server was told, whether it is well, its metrics and traces."""
