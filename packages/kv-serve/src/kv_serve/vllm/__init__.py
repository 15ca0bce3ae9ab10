"""Compressed KV caches in an unmodified vLLM, which loads this as a plugin."""
