"""What the rooms of the engine exchange.  It imports none of them."""
