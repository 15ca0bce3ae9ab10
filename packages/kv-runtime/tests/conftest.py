"""Triton's interpreter, where there is no GPU."""

import os
import sys

import torch

from kv_policy.interpreter import SWITCH

if not torch.cuda.is_available():  # triton reads this at import
    os.environ[SWITCH] = "1"

of_triton = ["test_decode_buffers.py", "test_page_graphs.py", "test_waiting.py"]  # Linux only
collect_ignore = [] if sys.platform == "linux" else of_triton
