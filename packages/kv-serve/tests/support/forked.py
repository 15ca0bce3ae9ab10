"""Processes that are copies of one that has imported vLLM, which takes longer than an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from unittest.mock import patch


@contextmanager
def forked(caller: str = "multiprocessing") -> Iterator[None]:
    """Let the processes that a module starts be copies, whatever start method it asks for."""
    context = ForkServerContext()
    context.set_forkserver_preload(["vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"])
    with patch(f"{caller}.get_context", lambda method=None: context):
        yield
