"""Which tokens of a cache stay, and in which tier."""
