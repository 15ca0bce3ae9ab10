"""Native code for CPUs: attention straight from compressed pages, and what writes them."""

from kv_cpu.backend import attend
from kv_cpu.library import chosen, compiled, forced, missing, runnable

__all__ = ["attend", "chosen", "compiled", "forced", "missing", "runnable"]
