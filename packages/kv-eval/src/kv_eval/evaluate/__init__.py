"""Measuring what a compressed cache costs in answers and saves in bytes."""
