"""Which architectures of transformers work with a compressed cache, checked on tiny models."""
