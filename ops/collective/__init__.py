"""Ops that exchange rows between ranks, and the memory through which they do."""
