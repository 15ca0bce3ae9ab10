"""The backend `triton`: attention over pages on a GPU.

Only the backend's loader imports these modules, so kv-attention does not require triton.
"""
