"""The page kernels in Triton, and what launches them; see `kv_paging.triton_kernels`.

Importing anything from here imports triton. Functions of kernels are marked `no_type_check`: Triton
reads their source, so nothing may be wrapped around them.
"""
