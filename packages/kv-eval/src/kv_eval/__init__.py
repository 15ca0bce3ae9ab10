"""Evaluation, calibration and inspection of compressed KV caches, and reports on them."""
