"""Triton's interpreter runs kernels where no GPU is."""

import sys

from interpreted import interpret_without_gpu

interpret_without_gpu()

of_triton = ["test_gate_triton.py", "test_recompilation.py"]  # Linux only
collect_ignore = [] if sys.platform == "linux" else of_triton
