"""Attention by native code: decoding straight from compressed pages on the CPU."""

from kv_cpu.backend import attend
from kv_cpu.library import chosen, compiled, forced, missing, runnable

__all__ = ["attend", "chosen", "compiled", "forced", "missing", "runnable"]
