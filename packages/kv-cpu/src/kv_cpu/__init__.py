"""Native code for CPUs: attention on compressed pages, and page kernels."""

from kv_cpu.backend import attend
from kv_cpu.library import chosen, compiled, forced, missing, runnable

__all__ = ["attend", "chosen", "compiled", "forced", "missing", "runnable"]
