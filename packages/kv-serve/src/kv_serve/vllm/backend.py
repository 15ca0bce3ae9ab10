"""The attention backend that vLLM calls: block sizes, step metadata and a layer's attention."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from kv_policy import KVPolicy, Rope
from kv_runtime import Outermost, RequestRows, Serving, SlotLayer, SlotStep, needs_rotation
from kv_serve.vllm.buffers import hold_basis
from kv_serve.vllm.config import UnservableError, check_dtype, served_policy
from kv_serve.vllm.rotation import find_ropes
from kv_serve.vllm.served import UnderPolicy
from kv_serve.vllm.shape import attention_layers, backend_of, check_alike, is_whole, model_shape
from kv_serve.vllm.storage import BilledPages, VllmSlots, stored

logger = init_logger("vllm.kv_serve")


class PagedBackend(AttentionBackend):
    """Base of the attention backends under a policy; `bound` creates the subclasses."""

    forward_includes_kv_cache_update = True
    storage: ClassVar["VllmSlots | BilledPages"]
    serving: ClassVar[Serving]
    config: ClassVar[VllmConfig]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Size vLLM's blocks for the policy's storage.

        Raises:
            UnservableError: the layer does not store one key and value per token and KV head.
        """
        if type(spec) is SlidingWindowSpec and is_whole(cls.config, spec.sliding_window):
            spec = FullAttentionSpec(
                block_size=cls.config.cache_config.block_size,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                head_size_v=spec.head_size_v,
                dtype=spec.dtype,
            )
        if type(spec) is not FullAttentionSpec or spec.non_causal:
            raise UnservableError(f"a kv_policy needs plain causal attention, not that of {spec}")
        return cls.storage.spec(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Return any block size: a page holds any number of whole tokens."""
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return our implementation."""
        return PagedImpl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """Return the storage's metadata builder."""
        return cls.storage.builder


def bound(
    chosen: type[AttentionBackend],
    policy: KVPolicy,
    storage: VllmSlots | BilledPages,
    serving: Serving,
    config: VllmConfig,
) -> type[AttentionBackend]:
    """Create the backend class for one model and one policy, from the backend that vLLM chose.

    vLLM queries the block size from the backend class without further arguments, so the storage is
    a class attribute.
    """
    held: dict[str, object] = {"storage": storage, "serving": serving, "config": config}
    held["__module__"] = __name__
    return type(f"PagedBackend[{policy}]", (PagedBackend, chosen), held)


def argument(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Return an argument that vLLM passes to an implementation; None if it passes none."""
    _, *names = signature(LayerImpl.__init__).parameters
    return (dict(zip(names, given, strict=False)) | {**named}).get(name)


class LayerImpl(AttentionImpl[SlotStep | RequestRows]):
    """What the layers with full attention have in common under a policy."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Read the policy and check it, the engine and this layer; vLLM passes the arguments.

        Raises:
            UnservableError: this layer, engine or policy is not supported.
        """
        self.config = get_current_vllm_config()
        self.policy = served_policy(self.config)
        check_dtype(kv_cache_dtype)
        wrong = {
            "a sliding window": not is_whole(self.config, sliding_window),
            "ALiBi": alibi_slopes is not None,
            "attention that is not decoder attention": attn_type != AttentionType.DECODER,
        }
        for what in (name for name, given in wrong.items() if given):
            raise UnservableError(f"a layer of this model has {what}; a kv_policy cannot serve it")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.softcap, self.sinks = logits_soft_cap or None, sinks
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.target = kv_sharing_target_layer_name

    def attention(self, backend: type[PagedBackend], index: int) -> Any:
        """Return the attention of this layer over what layer `index` under the policy stores.

        It takes the metadata of the storage's builder.
        """
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.detach().unflatten(0, (self.num_kv_heads, -1))
        name = backend.serving.backend
        return backend.storage.layer(index, self.scale, name, self.softcap, sinks)

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Any,  # None, like the value, in a layer without keys
        value: Any,
        kv_cache: Tensor,
        step: SlotStep | RequestRows,
        output: Tensor,
    ) -> None:
        """Write the attention of a step's tokens to `output`; shapes as in `SlotLayer`."""
        ...

    def skip(self, query: Tensor, key: Any) -> None:
        """Do nothing in a run without a cache: vLLM's profiling, or ours for ropes."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Any,  # None, like the value, in a layer without keys
        value: Any,
        kv_cache: Tensor,
        attn_metadata: SlotStep | RequestRows | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend in a step, and return `output`; zeros in a run without a cache."""
        if attn_metadata is None:
            self.skip(query, key)
            return output.zero_()
        self.attend(query, key, value, kv_cache, attn_metadata, output)
        return output


class PagedImpl(UnderPolicy, LayerImpl):
    """Attention of one layer that stores keys and values under the policy."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Read the policy and check it, the engine and this layer; vLLM passes the arguments.

        Raises:
            UnservableError: this layer, engine or policy is not supported.
        """
        super().__init__(*given, **named)
        self.readers = 0  # further layers of the model that attend to the same keys and values
        self.fresh: tuple[Tensor, Tensor] | None = None  # those of the step, for readers
        self.rope: Rope | None = None  # of the layer, if the policy needs it
        self.seen: list[Tensor] | None = None  # queries and keys, while ropes are found
        # The first layer leads to the model, which vLLM gives to no plugin.
        first = needs_rotation(self.policy) and not attention_layers(self.config)
        own = ref(self)
        self.model = (
            Outermost(lambda x: isinstance(x, Attention) and x.impl is own()) if first else None
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the layer's backend, which sizes its blocks; vLLM calls this after the weights load.

        Raises:
            UnservableError: the layer's attention or the format is not supported.
        """
        layers = attention_layers(self.config)
        index = next(i for i, layer in enumerate(layers) if layer.impl is self)
        layer = layers[index]
        chosen = layer.attn_backend
        first = layers[0].attn_backend
        if index and issubclass(first, PagedBackend):
            layer.attn_backend = first
        else:
            shape = model_shape(self.config, layer)
            storage = stored(self.config, self.policy, shape)
            check_alike(self.config, layers, in_pages=isinstance(storage, BilledPages))
            if self.model is not None:
                find_ropes(self.config, self.policy, self.model.found(), layers)
            serving = backend_of(self.config, self.policy, shape)
            layer.attn_backend = bound(chosen, self.policy, storage, serving, self.config)
            logger.info(
                "kv-serve stores keys and values as %s: %s; attention backend: %s",
                str(self.policy),
                str(storage),
                str(serving),
            )
        self.index = index
        self.layer = self.attention(layer.attn_backend, index)
        if isinstance(self.layer, SlotLayer):
            hold_basis(layer, self.layer.basis)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        step: SlotStep | RequestRows,
        output: Tensor,
    ) -> None:
        """Store the new tokens and write their attention to `output`."""
        if self.readers:  # a compiled model reuses a layer's memory after its attention
            self.fresh = key, value = key.clone(), value.clone()
        more = self.readers > 0
        self.layer.forward(query, key, value, kv_cache, step, output, more=more)

    def skip(self, query: Tensor, key: Tensor) -> None:
        """Record queries and keys, while ropes are found."""
        if self.seen is not None:
            self.seen.append(torch.cat((query, key), dim=1))
