"""The tiny model with a tokenizer of single characters."""

from tiny_fixtures import folder, loaded

__all__ = ["folder", "loaded"]
