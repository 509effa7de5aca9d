"""The passes that raise the graph of a captured model to what the others read: see ``RAISE``."""
