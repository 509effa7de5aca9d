"""What a worker does for drafts."""
