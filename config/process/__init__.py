"""What a process sets up for itself: its log, and when it collects garbage."""
