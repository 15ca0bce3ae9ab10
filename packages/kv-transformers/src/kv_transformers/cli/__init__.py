"""Shared parts of commands that load a model, and `kv-serve generate`."""
