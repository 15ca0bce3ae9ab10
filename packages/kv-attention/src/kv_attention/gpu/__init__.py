"""The backend `triton`: attention over pages on a GPU.

Only the backend's loader imports what lies here, so that kv-attention needs no triton.
"""
