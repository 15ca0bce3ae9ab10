"""Attention over pages of compressed keys and values, in parts that add up exactly."""
