"""What vLLM's sleep at level 2 does to memory, on a CPU, where vLLM ignores requests to sleep."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Recorded(TorchDispatchMode):
    """Collects the memory of all results, but for views: files that are mapped are no results."""

    def __init__(self, found: dict[int, UntypedStorage]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        results = op(*args, **(named or {}))
        given = _memories((args, named))
        self.found |= {at: each for at, each in _memories(results).items() if at not in given}
        return results


def _memories(tree: Any) -> dict[int, UntypedStorage]:
    tensors = (each for each in tree_iter(tree) if isinstance(each, Tensor))
    memories = (each.untyped_storage() for each in tensors)
    return {each.data_ptr(): each for each in memories}


@dataclass(frozen=True)
class Sleeper:
    """The memory that a worker allocated while its weights were loaded."""

    lost: dict[int, UntypedStorage] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the memory of engines that start inside."""
        from vllm.v1.worker.cpu_worker import CPUWorker

        load = CPUWorker.load_model

        def recorded(worker: CPUWorker, **options: Any) -> None:
            with _Recorded(self.lost):
                load(worker, **options)

        with patch.object(CPUWorker, "load_model", recorded):
            yield

    def sleep_and_wake(self, engine: Any) -> None:
        """Overwrite that memory and the KV cache, and restore what vLLM or its user restores.

        vLLM copies buffers back by itself; its user loads the weights again.
        """
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        model = runner.model
        tensors = [*model.parameters(), *model.buffers()]
        kept = [(each.data, each.data.clone()) for each in tensors]
        assert engine.reset_prefix_cache()
        caches = [each.untyped_storage() for each in runner.kv_caches]
        assert self.lost
        for memory in (*self.lost.values(), *caches):
            if memory.nbytes():
                torch.tensor([], dtype=torch.uint8).set_(memory).fill_(255)
        for place, value in kept:
            place.copy_(value)
