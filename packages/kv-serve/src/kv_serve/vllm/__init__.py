"""Compressed pages inside a stock vLLM, which imports this through an entry point."""
