"""The two ways of storing tokens in vLLM's blocks, chosen by the policy.

One format for all tokens is stored where vLLM's slots are, so that vLLM can share the blocks of
prefixes. All else is stored in pages, which vLLM's blocks pay for.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from kv_policy import CacheShape, KVPolicy, TokenFormat
from kv_runtime import Account, Bases, Layout, SlotLayer
from kv_serve.vllm.attach import attach
from kv_serve.vllm.config import UnservableError, plain_format
from kv_serve.vllm.connector import PageLayer
from kv_serve.vllm.rows import RowsBuilder
from kv_serve.vllm.shape import first_heads
from kv_serve.vllm.slots import SlotBuilder
from kv_serve.vllm.spec import PagedSpec, register
from kv_transformers.fitted import expect_fitted, fingerprint_at

# Of a block that pays for pages, where users do not say: finer than vLLM's own default.
BLOCK_TOKENS: Final = 16

logger = init_logger("vllm.kv_serve")


@dataclass(frozen=True)
class VllmSlots:
    """A token's bytes lie in the slot that vLLM gives it."""

    format: TokenFormat
    full: int  # bytes that an uncompressed token takes per head

    builder: ClassVar[type[AttentionMetadataBuilder]] = SlotBuilder

    def spec(self, spec: FullAttentionSpec) -> AttentionSpec:
        """Say that a slot takes the bytes of the format."""
        return replace(spec, dtype=torch.uint8, state_content_bytes=self.format.nbytes)

    def layer(self, index: int, scale: float, backend: str) -> SlotLayer:
        """Make what attends in a layer."""
        return SlotLayer(self.format, scale, backend)

    def __str__(self) -> str:
        """As the log says it."""
        return f"{self.format.nbytes} bytes per token and KV head in place of {self.full}"


@dataclass(frozen=True)
class BilledPages:
    """Tokens lie in pages of their layer and head; a block pays for some of them."""

    layout: Layout
    block_tokens: int | None  # as users say, or None
    full: int

    builder: ClassVar[type[AttentionMetadataBuilder]] = RowsBuilder

    def spec(self, spec: FullAttentionSpec) -> AttentionSpec:
        """Say that a layer has its share of what a block pays for."""
        tokens = self.block_tokens or BLOCK_TOKENS
        account = Account.of(self.layout, tokens)
        cells = self.layout.shape.layers * spec.num_kv_heads * tokens
        share = -(-account.block_bytes // cells)
        return PagedSpec(
            block_size=tokens,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=torch.uint8,
            state_content_bytes=share,
            account=account.holding(share * cells),
        )

    def layer(self, index: int, scale: float, backend: str) -> PageLayer:
        """Make what attends in a layer."""
        return PageLayer(index)

    def __str__(self) -> str:
        """As the log says it."""
        heads = sum(map(len, self.layout.kind))
        each = self.layout.token_bytes / heads
        return f"at most {each:g} bytes per kept token and KV head in place of {self.full}"


def stored(config: VllmConfig, policy: KVPolicy, shape: CacheShape) -> VllmSlots | BilledPages:
    """Choose how a policy is stored, and let vLLM make our connector where pages are counted.

    Raises:
        UnservableError: a connector is configured, and nothing would be counted; or the ranks of
            tensor parallelism would lay out their pages differently.
        WrongModelError: the policy was calibrated with another model.
    """
    full = shape.token_bytes // (shape.layers * shape.kv_heads)
    format = plain_format(policy, shape)
    if format is not None:
        if config.kv_transfer_config is not None:
            raise UnservableError(
                f"{policy} is stored where vLLM's slots are, and needs no KV connector; leave "
                "--kv-transfer-config out"
            )
        return VllmSlots(format, full)
    if policy.fitted_to is not None:
        expect_fitted(policy, fingerprint_at(config.model_config.model))
    attach(config)
    register()
    cache = config.cache_config
    if cache.enable_prefix_caching:
        logger.info("prefixes are not shared: no block of vLLM's has the tokens of %s", policy)
    own = cache.block_size if cache.user_specified_block_size else None
    tokens = own or BLOCK_TOKENS
    firsts = set(first_heads(config)) | {shape.first_head}
    of = {first: _layout(policy, replace(shape, first_head=first), tokens) for first in firsts}
    if len({Account.of(each, tokens) for each in of.values()}) > 1:
        raise UnservableError(
            f"the policy {policy} cannot be served with tensor parallelism: its heads keep "
            "different numbers of dimensions, and vLLM's blocks are as large on every rank"
        )
    return BilledPages(of[shape.first_head], own, full)


def _layout(policy: KVPolicy, shape: CacheShape, tokens: int) -> Layout:
    bases = None if policy.basis is None else Bases.of(policy.basis, shape, torch.device("cpu"))
    return Layout.of(policy, shape, bases, tokens)
