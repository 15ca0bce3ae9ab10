"""Evaluation results as a self-contained page and as pictures."""
