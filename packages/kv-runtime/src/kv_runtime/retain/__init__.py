"""Eviction and tier placement of tokens."""
