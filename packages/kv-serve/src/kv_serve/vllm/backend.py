"""What vLLM calls: how large a token is, what a step is, and a layer's attention."""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheSpec

from kv_policy import CacheShape, KVPolicy, TokenFormat
from kv_serve.backends import serving
from kv_serve.vllm.config import UnservableError, bound_format, check_dtype, served_policy
from kv_serve.vllm.layer import PagedLayer
from kv_serve.vllm.step import Blocks, Step
from kv_serve.vllm.switch import CpuBackend

logger = init_logger("vllm.kv_serve")


class PagedBackend(CpuBackend):
    """The backend of layers that store tokens in one format; made by `bound`."""

    forward_includes_kv_cache_update = True
    format: ClassVar[TokenFormat]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Size vLLM's blocks by the format: its bytes per token and KV head.

        Raises:
            UnservableError: the layer does not keep one key and value per token and head.
        """
        if type(spec) is not FullAttentionSpec or spec.non_causal:
            raise UnservableError(f"a kv_policy needs plain causal attention, not that of {spec}")
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.format.nbytes)

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Any: a page holds whole tokens, however many."""
        return [MultipleOf(1)]

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Ours."""
        return PagedImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Ours."""
        return StepBuilder


def bound(policy: KVPolicy, format: TokenFormat) -> type[PagedBackend]:
    """Make the backend of the layers that this policy stores in this format.

    vLLM asks a layer's backend class for the size of its blocks and gives it no other hint, so the
    format is an attribute of the class; the name tells classes of different formats apart.
    """
    name = f"PagedBackend[{policy},{format.nbytes}]"
    return type(name, (PagedBackend,), {"format": format, "__module__": __name__})


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Says once per step, for all layers, where tokens go and what they see."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Note how blocks are divided into pages."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.blocks = Blocks(kv_cache_spec.num_kv_heads, kv_cache_spec.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Step:
        """Describe one step."""
        given = common_attn_metadata
        return self.blocks.step(
            given.query_start_loc_cpu[: given.num_reqs + 1],
            given.seq_lens[: given.num_reqs],
            given.max_seq_len,
            given.block_table_tensor[: given.num_reqs],
            given.slot_mapping[: given.num_actual_tokens],
        )


class PagedImpl(AttentionImpl[Step]):
    """Attention of one layer, under the policy of the current configuration."""

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
        """Read the policy and check it, the engine and this layer; vLLM gives the arguments.

        Raises:
            UnservableError: this layer, this engine or this policy is not one that is served.
        """
        self.config = get_current_vllm_config()
        self.policy = served_policy(self.config)
        check_dtype(kv_cache_dtype)
        wrong = {
            "a sliding window": sliding_window is not None,
            "ALiBi": alibi_slopes is not None,
            "a soft cap on its logits": bool(logits_soft_cap),
            "attention that is not a decoder's": attn_type != AttentionType.DECODER,
            "no cache of its own": kv_sharing_target_layer_name is not None,
            "learned attention sinks": sinks is not None,
        }
        for what in (name for name, given in wrong.items() if given):
            raise UnservableError(f"a layer of this model has {what}; a kv_policy cannot serve it")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer a backend that sizes its blocks; vLLM calls this when the layer is whole.

        Raises:
            UnservableError: the layer is of a special kind, or the format cannot be served.
        """
        layers = self.config.compilation_config.static_forward_context.values()
        layer = next(x for x in layers if isinstance(x, Attention) and x.impl is self)
        chosen = layer.attn_backend
        if chosen is not CpuBackend and not issubclass(chosen, PagedBackend):
            raise UnservableError(
                f"a layer of this model attends by {chosen.__name__}; a kv_policy cannot serve it"
            )
        shape = CacheShape(
            layers=self.config.model_config.get_num_layers(self.config.parallel_config),
            kv_heads=self.num_kv_heads,
            group=self.num_heads // self.num_kv_heads,
            key_dim=layer.head_size,
            value_dim=layer.head_size_v,
            dtype=layer.kv_cache_torch_dtype,
        )
        format = bound_format(self.policy, shape)
        served = serving(self.config.device_config.device_type)
        self.layer = PagedLayer(format, self.scale, served.backend)
        layer.attn_backend = bound(self.policy, format)
        logger.info_once(
            "kv-serve stores keys and values as %s: %d bytes per token and KV head in place of %d; "
            "attention runs by %s",
            str(self.policy),
            format.nbytes,
            shape.token_bytes // (shape.layers * shape.kv_heads),
            str(served),
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Store the new tokens and attend, into `output`; shapes are those of `PagedLayer`."""
        if attn_metadata is None:  # vLLM runs the model once without a cache, to measure it
            return output.zero_()
        self.layer.forward(query, key, value, kv_cache, attn_metadata, output)
        return output
