"""The two ways of storing tokens in vLLM's blocks, chosen by the policy.

With one format for all tokens, a token is stored in vLLM's slot, so prefix caching works. Any other
policy stores tokens in pages, and a request owns enough vLLM blocks to cover its pages.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
)

from kv_policy import CacheShape, KVPolicy, TokenFormat
from kv_runtime import Account, Bases, Layout, SlotLayer, fit_block
from kv_serve.vllm.attach import attach
from kv_serve.vllm.config import UnservableError, plain_format
from kv_serve.vllm.connector import PageLayer
from kv_serve.vllm.rows import RowsBuilder
from kv_serve.vllm.shape import first_heads, kept_specs
from kv_serve.vllm.slots import SlotBuilder
from kv_serve.vllm.spec import PagedSpec, register
from kv_transformers.fitted import expect_fitted, fingerprint_at

# Default block size when blocks cover pages: finer than vLLM's own default.
BLOCK_TOKENS: Final = 16

logger = init_logger("vllm.kv_serve")


@dataclass(frozen=True)
class VllmSlots:
    """A token is stored in its vLLM slot."""

    format: TokenFormat
    full: int  # bytes of an uncompressed token per KV head
    config: VllmConfig = field(repr=False, compare=False)

    builder: ClassVar[type[AttentionMetadataBuilder]] = SlotBuilder

    def spec(self, spec: FullAttentionSpec) -> AttentionSpec:
        """Return the spec with slots of the format's size.

        Beside layers that vLLM keeps, blocks of other sizes would be padded to the largest, so
        there a block has more tokens, in as many bytes. To size the blocks of states, vLLM asks for
        a spec of one token.

        Raises:
            UnservableError: a prefix could not be found in blocks of so many tokens.
        """
        own = replace(spec, dtype=torch.uint8, state_content_bytes=self.format.nbytes)
        given, kept = self.config.cache_config.block_size, kept_specs(self.config)
        alone = self.config.scheduler_config.disable_hybrid_kv_cache_manager
        if not kept or alone or spec.block_size != given:
            return own
        most = max(each.page_size_bytes for each in kept)
        token_bytes = own.page_size_bytes // given
        tokens, nbytes = fit_block(given, token_bytes, most, spec.num_kv_heads)
        chunks = any(isinstance(each, ChunkedLocalAttentionSpec) for each in kept)
        if chunks and given % tokens and self.config.cache_config.enable_prefix_caching:
            raise UnservableError(
                "layers of this model attend to chunks, so vLLM finds prefixes only if the blocks "
                "of all layers have equally many tokens, and those of a smaller format have more; "
                "set enable_prefix_caching to false (--no-enable-prefix-caching)"
            )
        padded = None if nbytes == tokens * token_bytes else nbytes
        return replace(own, block_size=tokens, page_size_padded=padded)

    def layer(self, index: int, scale: float, backend: str) -> SlotLayer:
        """Return the attention of a layer."""
        return SlotLayer(self.format, scale, backend)

    def __str__(self) -> str:
        """Describe the storage for the log."""
        return f"{self.format.nbytes} bytes per token and KV head in place of {self.full}"


@dataclass(frozen=True)
class BilledPages:
    """Tokens are stored in pages per layer and KV head; each block covers some pages."""

    layout: Layout
    block_tokens: int | None  # set by the user, or None
    full: int

    builder: ClassVar[type[AttentionMetadataBuilder]] = RowsBuilder

    def spec(self, spec: FullAttentionSpec) -> AttentionSpec:
        """Return the spec of a layer's share of a block."""
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
        """Return the attention of a layer."""
        return PageLayer(index)

    def __str__(self) -> str:
        """Describe the storage for the log."""
        heads = sum(map(len, self.layout.kind))
        each = self.layout.token_bytes / heads
        return f"at most {each:g} bytes per kept token and KV head in place of {self.full}"


def stored(config: VllmConfig, policy: KVPolicy, shape: CacheShape) -> VllmSlots | BilledPages:
    """Choose the storage of a policy, and attach our connector if it uses pages.

    Raises:
        UnservableError: a connector is configured for a policy without pages; or the ranks of
            tensor parallelism would lay out their pages differently.
        WrongModelError: the policy was calibrated with another model.
    """
    full = shape.token_bytes // (shape.layers * shape.kv_heads)
    format = plain_format(policy, shape)
    if format is not None:
        if config.kv_transfer_config is not None:
            raise UnservableError(
                f"{policy} is stored in vLLM's slots and needs no KV connector; omit "
                "--kv-transfer-config"
            )
        return VllmSlots(format, full, config)
    if policy.fitted_to is not None:
        expect_fitted(policy, fingerprint_at(config.model_config.model))
    attach(config)
    register()
    cache = config.cache_config
    if cache.enable_prefix_caching:
        logger.info("prefixes are not shared: vLLM's blocks do not hold the tokens of %s", policy)
    own = cache.block_size if cache.user_specified_block_size else None
    tokens = own or BLOCK_TOKENS
    firsts = set(first_heads(config)) | {shape.first_head}
    of = {first: _layout(policy, replace(shape, first_head=first), tokens) for first in firsts}
    if len({Account.of(each, tokens) for each in of.values()}) > 1:
        raise UnservableError(
            f"the policy {policy} cannot be served with tensor parallelism: its heads keep "
            "different numbers of dimensions, but vLLM's blocks have one size on every rank"
        )
    return BilledPages(of[shape.first_head], own, full)


def _layout(policy: KVPolicy, shape: CacheShape, tokens: int) -> Layout:
    bases = None if policy.basis is None else Bases.of(policy.basis, shape, torch.device("cpu"))
    return Layout.of(policy, shape, bases, tokens)
