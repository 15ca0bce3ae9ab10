"""Evaluation inside vLLM."""
