"""What vLLM 0.29 does not do, and later ones do; delete this with 0.29.

Its scheduler does not hand its manager of blocks to a KV connector, and it preempts a request as
soon as another one lacks blocks. Later ones ask the connector first: if blocks are about to be
free, the request that lacks them waits for the next step, and so do those behind it. With our
connector, the constructor hands over the manager, and the method that cuts the tokens of a request
asks before vLLM allocates blocks for them: vLLM passes over a running request that has no tokens in
a step.

Where a model runs in the code of transformers, its layers of attention are in no module, so the
loader does not tell them that weights are loaded, when they choose their backend.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from vllm.v1.request import RequestStatus

from kv_serve.vllm import boundaries
from kv_serve.vllm.extending import extend

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


# The module of the class from which models in the code of transformers are derived.
_TRANSFORMERS: Final = "vllm.model_executor.models.transformers.base"


class AskedFirst:
    """A connector that has the manager of blocks, and is asked before a preemption.

    It is a base behind vLLM's own, which has these methods from 0.30 on.

    Attributes:
        postponed: the last step in which requests wait for blocks.
    """

    postponed: int = -1

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the scheduler's manager."""

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks are about to be free."""
        return False


def watch() -> None:
    """Complete the scheduler of vLLM 0.29, before one is made; may be called repeatedly."""
    from vllm.v1.core.sched.scheduler import Scheduler

    boundaries.watch()  # what it leaves of the tokens needs blocks, so ours is around it
    extend(Scheduler, "__init__", _made)
    extend(Scheduler, "_reserve_prefill_lookahead", _reserved)


def watch_loader() -> None:
    """Complete the loader of vLLM 0.29, before a model is loaded; may be called repeatedly."""
    from vllm.model_executor.model_loader import base_loader

    extend(base_loader, "process_weights_after_loading", _loaded)


def _loaded(
    process: Callable[..., None], model: torch.nn.Module, *given: Any, **options: Any
) -> None:
    if any(kind.__module__ == _TRANSFORMERS for kind in type(model).__mro__):
        layers = cast(dict[int, torch.nn.Module], model.attention_instances)
        for index, layer in layers.items():
            model.add_module(f"attention_{index}", layer)
    process(model, *given, **options)


def _made(make: Callable[..., None], self: "Scheduler", *given: Any, **options: Any) -> None:
    make(self, *given, **options)
    if isinstance(self.connector, AskedFirst):
        self.connector.bind_kv_cache_manager(self.kv_cache_manager)


def _reserved(
    reserve: Callable[["Scheduler", "Request", int, int], int],
    self: "Scheduler",
    request: "Request",
    num_computed_tokens: int,
    num_new_tokens: int,
) -> int:
    tokens = reserve(self, request, num_computed_tokens, num_new_tokens)
    connector, step = self.connector, self.current_step
    runs = request.status == RequestStatus.RUNNING  # vLLM preempts nobody for one that waits
    if not tokens or not runs or not isinstance(connector, AskedFirst):
        return tokens
    waits = connector.postponed == step or (
        _lacks(self, request, tokens)
        and (connector.has_pending_block_frees() or not _frees(self, _next(self)))
    )
    if waits:
        connector.postponed = step
    return 0 if waits else tokens


def _lacks(scheduler: "Scheduler", request: "Request", tokens: int) -> bool:
    """Return whether the blocks for a running request's next tokens are not free.

    Counted as by `KVCacheManager.allocate_slots`.
    """
    manager, name = scheduler.kv_cache_manager, request.request_id
    computed, most = request.num_computed_tokens, scheduler.max_model_len
    before = min(computed, most)
    settled = max(0, before - request.num_in_flight_tokens)
    manager.remove_skipped_blocks(name, settled, request.num_prompt_tokens)
    count = manager.coordinator.get_num_blocks_to_allocate(
        request_id=name,
        num_tokens=min(before + tokens + scheduler.num_lookahead_tokens, most),
        new_computed_blocks=manager.empty_kv_cache_blocks.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=computed,
        num_local_computed_tokens=computed,
        num_tokens_main_model=before + tokens,
    )
    return bool(count > manager.block_pool.get_num_free_blocks())


def _next(scheduler: "Scheduler") -> "Request":
    """Return the request that vLLM preempts next."""
    if scheduler.scheduler_config.policy == "priority":
        return max(scheduler.running, key=lambda each: (each.priority, each.arrival_time))
    return scheduler.running[-1]


def _frees(scheduler: "Scheduler", request: "Request") -> bool:
    """Return whether a preemption frees blocks at once: no step in flight writes to them."""
    return bool(
        not scheduler.defer_block_free or request.last_sched_seq <= scheduler.processed_step_seq
    )
