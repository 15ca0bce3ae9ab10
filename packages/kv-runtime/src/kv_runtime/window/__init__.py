"""The recent window of raw tokens."""
