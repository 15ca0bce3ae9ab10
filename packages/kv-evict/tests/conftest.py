"""Triton's interpreter runs kernels where no GPU is."""

import os
import sys

import torch

from kv_policy.interpreter import SWITCH

if not torch.cuda.is_available():  # triton reads this at import
    os.environ[SWITCH] = "1"

of_triton = ["test_gate_triton.py", "test_recompilation.py"]  # Linux only
collect_ignore = [] if sys.platform == "linux" else of_triton
