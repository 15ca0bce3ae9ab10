"""The page kernels in Triton, and their launchers; see `kv_paging.triton_kernels`.

Importing from here imports triton. Kernel functions are marked `no_type_check`: Triton reads their
source, so they cannot be wrapped.
"""
