"""Compressed KV caches inside transformers and vLLM, and a command line to measure them."""
