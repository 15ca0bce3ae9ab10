"""Which tokens of which head live: eviction policies of the literature."""
