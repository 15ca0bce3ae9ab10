"""Layers that attend to keys and values which an earlier layer stores: Gemma 3n and Gemma 4."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from kv_runtime import RequestRows, SlotStep
from kv_serve.vllm.backend import LayerImpl, PagedImpl, argument
from kv_serve.vllm.config import UnservableError
from kv_serve.vllm.names import KEY
from kv_serve.vllm.shape import attention_layers
from kv_serve.vllm.storage import BilledPages


class ReaderImpl(LayerImpl):
    """Attention of one layer without a cache of its own, over that of its target."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Attend as the target does; vLLM calls this after it has done so for the target.

        Raises:
            UnservableError: the target is not under the policy, or this layer is unlike it.
        """
        layers = self.config.compilation_config.static_forward_context
        own = next(each for each in layers.values() if getattr(each, "impl", None) is self)
        stores = layers[self.target].impl
        if not isinstance(stores, PagedImpl):
            raise UnservableError(
                f"a layer with full attention reads the keys of {self.target}, which is not under "
                "the policy"
            )
        mine, its = ((x.num_heads, x.num_kv_heads, x.head_size, x.scale) for x in (self, stores))
        if mine != its:
            raise UnservableError(
                f"a layer reads the keys of {self.target} with query heads, KV heads, dimensions "
                f"and scale {mine} instead of {its}; a kv_policy needs equal ones"
            )
        own.attn_backend = layers[self.target].attn_backend
        storage = own.attn_backend.storage
        last = len(attention_layers(self.config)) - 1
        if isinstance(storage, BilledPages) and stores.index != last:
            raise UnservableError(
                f"a layer reads the keys of {self.target}, and later layers store keys of their "
                f"own; this {KEY} needs the last of these to be read: use one with one format for "
                "all tokens, such as k8v4"
            )
        self.stores, self.place = stores, stores.readers
        self.layer = self.attention(own.attn_backend, stores.index)
        stores.readers += 1

    def attend(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        step: SlotStep | RequestRows,
        output: Tensor,
    ) -> None:
        """Write the attention to the target's tokens to `output`."""
        assert self.stores.fresh is not None, "the target attends first"
        more = self.place + 1 < self.stores.readers
        fresh = self.stores.fresh
        self.layer.forward(query, *fresh, kv_cache, step, output, stored=True, more=more)
        if not more:
            self.stores.fresh = None


class FullImpl(PagedImpl):
    """Ours for layers of full attention, with a cache of their own or without."""

    def __new__(cls, *given: Any, **named: Any) -> AttentionImpl:
        """Return an implementation for a layer; vLLM passes the arguments."""
        target = argument("kv_sharing_target_layer_name", given, named)
        return super().__new__(cls) if target is None else ReaderImpl(*given, **named)
