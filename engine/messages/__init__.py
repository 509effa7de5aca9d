"""The messages that the rooms of the engine exchange.  This room imports none of them."""
