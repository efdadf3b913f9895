"""How fast: the same work by several implementations, in turns, on one machine."""
