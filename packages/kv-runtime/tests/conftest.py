"""Triton's interpreter, where there is no GPU."""

import sys

from interpreted import interpret_without_gpu

interpret_without_gpu()

of_triton = [  # Linux only
    "test_decode_buffers.py",
    "test_page_graphs.py",
    "test_reading_triton.py",
    "test_waiting.py",
]
collect_ignore = [] if sys.platform == "linux" else of_triton
