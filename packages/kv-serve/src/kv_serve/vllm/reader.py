"""Layers that attend to keys and values which an earlier layer stores: Gemma 3n and Gemma 4."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl

from kv_runtime import RequestRows, SlotStep
from kv_serve.vllm.backend import LayerImpl, PagedImpl
from kv_serve.vllm.config import UnservableError

TARGET = 9  # of the arguments of an implementation, the name of the layer that stores


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
        self.stores, self.place = stores, stores.readers
        self.layer = self.attention(own.attn_backend.storage, stores.index)
        stores.readers += 1

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: SlotStep | RequestRows | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention to the target's tokens to `output`."""
        if attn_metadata is None:
            return output.zero_()
        assert self.stores.fresh is not None, "the target attends first"
        more = self.place + 1 < self.stores.readers
        fresh = self.stores.fresh
        self.layer.forward(query, *fresh, kv_cache, attn_metadata, output, stored=True, more=more)
        if not more:
            self.stores.fresh = None
        return output


class FullImpl(PagedImpl):
    """Ours for layers of full attention, with a cache of their own or without."""

    def __new__(cls, *given: Any, **named: Any) -> AttentionImpl:
        """Return an implementation for a layer; vLLM passes the arguments."""
        target = given[TARGET] if len(given) > TARGET else named.get("kv_sharing_target_layer_name")
        return super().__new__(cls) if target is None else ReaderImpl(*given, **named)
