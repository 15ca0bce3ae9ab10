"""A pool of equal byte pages, and a stream of pages per sequence, layer and KV head."""
