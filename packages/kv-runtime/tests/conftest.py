"""Triton's interpreter, where there is no GPU."""

import sys

from interpreted import interpret_without_gpu

interpret_without_gpu()

of_triton = ["test_decode_buffers.py", "test_page_graphs.py", "test_waiting.py"]  # Linux only
collect_ignore = [] if sys.platform == "linux" else of_triton
