"""An engine's steps over slots, repeated where nothing can be read: what a GPU has is on `meta`.

A read of such a tensor raises. So does an operation on tensors of both sides, which on a GPU copies
those of the host and waits; `kv_runtime.slots` has one function that copies without waiting.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kv_runtime.slots
from kv_runtime import DecodeBuffers

META = torch.device("meta")


class _Apart(TorchDispatchMode):
    """Raises for operations on tensors of both sides; numbers are no tensors of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        sides = {x.device.type for x in given if x.ndim}
        result = func(*args, **(kwargs or {}))
        sides |= {x.device.type for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        if len(sides) > 1:
            raise AssertionError(f"{func} copies from the host, which waits")
        return result


class Shadow:
    """Repeats the steps of a builder of metadata, and notes what they copy.

    Attributes:
        steps: by step, the new tokens of its requests, and how often tensors were copied without
            waiting.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[list[int], int]] = []

    def watch(self, builder: Any) -> None:
        """Repeat every step that a builder makes, from now on."""
        build = builder.build

        def built(  # the names are vLLM's, of which some versions give them by name
            common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            self._repeat(builder, common_attn_metadata)
            return build(common_prefix_len, common_attn_metadata, fast_build)

        builder.build = built

    def _repeat(self, builder: Any, given: Any) -> None:
        """Make the metadata of a step, and attend in a layer."""
        from triton.runtime.interpreter import GridExecutor

        from kv_serve.vllm.shape import attention_layers

        copied = 0
        apart = _Apart()

        def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
            nonlocal copied
            copied += 1
            apart.__exit__(None, None, None)
            try:
                return x.to(device)
            finally:
                apart.__enter__()

        layer = attention_layers(builder.vllm_config)[0]
        new, held = given.query_start_loc_cpu.diff().tolist(), builder.buffers
        device = ("seq_lens", "block_table_tensor", "slot_mapping")
        for name in device:
            setattr(given, f"_{name}", getattr(given, name))
            setattr(given, name, getattr(given, name).to(META))
        if held is not None:
            builder.buffers = DecodeBuffers.of(builder.blocks, held.requests, held.longest, META)
        with (
            patch.object(GridExecutor, "__call__", lambda kernel, *given, **named: None),
            patch.object(kv_runtime.slots, "to_device", moved),
            apart,
        ):
            step = type(builder).build(builder, 0, given)
            count = given.num_actual_tokens
            query = torch.empty(count, layer.num_heads, layer.head_size, device=META)
            key = torch.empty(count, layer.num_kv_heads, layer.head_size, device=META)
            cache = torch.empty(layer.kv_cache.shape, dtype=torch.uint8, device=META)
            layer.impl.layer.forward(query, key, key, cache, step, torch.empty_like(query))
        builder.buffers = held
        for name in device:
            setattr(given, name, getattr(given, f"_{name}"))
        self.steps.append((new, copied))
