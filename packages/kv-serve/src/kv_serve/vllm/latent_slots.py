"""Latents of MLA in vLLM's slots, in one format for all tokens.

vLLM expands a prompt's latents to keys and values of each head, and attends to these. Decoding is
absorbed: all heads attend to the latents as to one KV head, whose value is the first dimensions of
its key.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from weakref import ref

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from kv_policy import CacheShape, TokenFormat
from kv_runtime import Blocks, Outermost, SlotLayer, SlotStep
from kv_serve.vllm.config import UnservableError, check_dtype, plain_format, served_policy
from kv_serve.vllm.latent_rotation import check_rotation
from kv_serve.vllm.served import ServesPolicy, UnderPolicy
from kv_serve.vllm.shape import attention_layers, kept_specs, named_backend

logger = init_logger("vllm.kv_serve")


@dataclass
class LatentMetadata(MLACommonMetadata[Any]):
    """vLLM's metadata of a step, with the slots of its tokens and what decoding ones attend to."""

    slots: SlotStep | None = None


class LatentBuilder(MLACommonMetadataBuilder[LatentMetadata]):
    """Builds the slots and sequence lengths of a step, once for all layers."""

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        """Take the layout of blocks from the first layer; vLLM passes the arguments."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.blocks: Blocks = layers[layer_names[0]].impl.blocks

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LatentMetadata:
        """Return the metadata of one step; decoding requests come first."""
        given = common_attn_metadata
        found = super().build(common_prefix_len, given, fast_build)
        count = found.num_decodes
        slots = self.blocks.step(
            given.query_start_loc_cpu[: count + 1],
            given.seq_lens[:count],
            given.max_seq_len,
            given.block_table_tensor[:count],
            given.slot_mapping[: given.num_actual_tokens],
        )
        known = {each.name: getattr(found, each.name) for each in fields(found)}
        return LatentMetadata(**known, slots=slots)


class LatentBackend(ServesPolicy, CPUMLABackend):
    """Base of the backends for one format; `LatentImpl` creates the subclasses."""

    format: ClassVar[TokenFormat]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Size vLLM's blocks for the format.

        Raises:
            UnservableError: the layer stores something else than latents of all tokens.
        """
        if type(spec) is not MLAAttentionSpec:
            raise UnservableError(f"a kv_policy needs plain latent attention, not that of {spec}")
        return replace(spec, dtype=torch.uint8, state_content_bytes=cls.format.nbytes)

    @staticmethod
    def get_impl_cls() -> type[CPUMLAImpl]:
        """Return our implementation."""
        return LatentImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return our builder."""
        return LatentBuilder


class LatentImpl(UnderPolicy, CPUMLAImpl):
    """Latent attention of one layer, over latents in the policy's format."""

    def __init__(self, *given: Any, **named: Any) -> None:
        """Create the stock implementation, and check the policy; vLLM passes the arguments.

        Raises:
            UnservableError: the policy stores more than a format, or the engine is not supported.
        """
        super().__init__(*given, **named)
        self.config = get_current_vllm_config()
        policy = served_policy(self.config)
        check_dtype(self.kv_cache_dtype)
        dims = self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank
        dtype = self.config.model_config.dtype
        shape = CacheShape(1, 1, self.num_heads, *dims, dtype, value_in_key=True)
        format = plain_format(policy, shape)
        assert format is not None, "served_policy refuses other policies for latents"
        backend = named_backend(self.config).backend
        self.layer = SlotLayer(format, self.scale, backend)
        size = self.config.cache_config.block_size
        device = torch.device(self.config.device_config.device_type)
        self.blocks = Blocks.of(format, 1, size, size * format.nbytes, device, backend)
        # Latents of the decoding tokens of the current step, as the model computed them.
        self.fresh: Float[Tensor, "m 1 D"] | None = None
        self.most = self.config.scheduler_config.max_num_seqs
        # The first layer leads to the model, which vLLM gives to no plugin.
        own = ref(self)
        self.model = (
            None
            if _layers(self.config)
            else Outermost(lambda x: isinstance(x, MLAAttention) and x.impl is own())
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Set the layer's backend, which sizes its blocks; vLLM calls this after the weights load.

        Raises:
            UnservableError: layers differ, or vLLM's rotary embedding is not as it should be.
        """
        super().process_weights_after_loading(act_dtype)
        own = _layers(self.config)
        layer = next(each for each in own if each.impl is self)
        first = own[0].attn_backend
        if not issubclass(first, LatentBackend):
            first = self._backend(act_dtype)
        if first.format != self.layer.format:
            raise UnservableError(
                "layers of this model have latents of different sizes, which a kv_policy cannot "
                "serve in vLLM"
            )
        layer.attn_backend = first
        if self.model is not None:
            check_rotation(self.model.found(), act_dtype)

    def _backend(self, dtype: torch.dtype) -> type[LatentBackend]:
        """Create the backend class of all layers, whose blocks vLLM sizes by it."""
        if kept_specs(self.config) or attention_layers(self.config):
            raise UnservableError(
                "this model has layers of other kinds beside latent attention (MLA), with which a "
                "kv_policy cannot serve it in vLLM"
            )
        form, policy = self.layer.format, served_policy(self.config)
        held: dict[str, object] = {"format": form, "__module__": __name__}
        full = (self.kv_lora_rank + self.qk_rope_head_dim) * dtype.itemsize
        logger.info(
            "kv-serve stores latents as %s: %d bytes per token in place of %d; attention backend: "
            "%s",
            str(policy),
            form.nbytes,
            full,
            str(named_backend(self.config)),
        )
        return type(f"LatentBackend[{policy}]", (LatentBackend,), held)

    def do_kv_cache_update(
        self,
        kv_c_normed: Float[Tensor, "m R"],
        k_pe: Float[Tensor, "m 1 P"],
        kv_cache: UInt8[Tensor, "blocks tokens nbytes"] | Float[Tensor, "0"],
        slot_mapping: Int[Tensor, " n"],
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,  # since vLLM 0.33; scales are the format's own
    ) -> None:
        """Store the latents of a step; without blocks, in a run that sizes them, do nothing."""
        if kv_cache.numel() == 0:
            return
        count = len(slot_mapping)
        key = torch.cat((kv_c_normed[:count, None], k_pe[:count].view(count, 1, -1)), dim=-1)
        vectors = key, key[..., : self.kv_lora_rank]
        pages, places = self.blocks.data(kv_cache), self.blocks.places(slot_mapping)
        self.blocks.kernels.place(pages, self.blocks.layout, *places, *vectors)
        self.fresh = key[: self.most].clone()  # a prompt's latents are not kept

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: UInt8[Tensor, "blocks tokens nbytes"],
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Float[Tensor, "m Q R"], None]:
        """Return the attention of decoding tokens to latents, earlier ones as they are stored."""
        assert isinstance(attn_metadata, LatentMetadata), "our builder makes it"
        assert attn_metadata.slots is not None, "our builder sets it"
        assert self.fresh is not None, "latents of a step are stored first"
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        key = self.fresh[: len(query)]
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        self.layer.forward(
            query,
            key,
            key[..., : self.kv_lora_rank],
            kv_c_and_k_pe_cache[:, None],
            attn_metadata.slots,
            out,
            stored=True,
        )
        return out, None

    def _compute_prefill_context(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: UInt8[Tensor, "blocks tokens nbytes"],
        attn_metadata: MLACommonMetadata,
        k_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of prompts to their earlier tokens, which are decoded first.

        vLLM itself has no such prompts on this backend, as it reads each whole.
        """
        prefill = attn_metadata.prefill
        assert prefill is not None, "there are prompts"
        size = self.blocks.layout.tokens
        table = prefill.block_table[:, : -(-attn_metadata.max_seq_len // size)]
        block, place = table.unique(return_inverse=True)
        latents = self.blocks.keys(kv_c_and_k_pe_cache, block)[:, 0].to(q.dtype)
        own = replace(prefill, block_table=place.to(table.dtype))
        given = replace(attn_metadata, prefill=own)
        out: tuple[Tensor, Tensor] = super()._compute_prefill_context(q, latents, given, k_scale)
        return out


def _layers(config: VllmConfig) -> list[MLAAttention]:
    """Return the layers whose latents are under the policy, in execution order."""
    layers = config.compilation_config.static_forward_context.values()
    return [x for x in layers if isinstance(x, MLAAttention) and isinstance(x.impl, LatentImpl)]
