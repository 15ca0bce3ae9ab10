"""The two ways of storing tokens in vLLM's blocks, chosen by the policy.

With one format for all tokens, a token is stored in vLLM's slot, so prefix caching works. Any other
policy stores tokens in pages, and a request owns enough vLLM blocks to cover its pages.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import torch
from jaxtyping import Float
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
)

from kv_policy import CacheShape, KVPolicy, LayerBasis, TokenFormat, tier_formats
from kv_runtime import Account, Bases, Layout, SlotLayer, check_shift, fit_block, fit_page
from kv_serve.vllm.attach import attach, is_ours
from kv_serve.vllm.beside import claim_folder, refused_drafts, refused_kept
from kv_serve.vllm.config import UnservableError, plain_format
from kv_serve.vllm.connector import PageLayer
from kv_serve.vllm.drafters import check_drafters, drafting_layers
from kv_serve.vllm.names import PREFIX, TURNS
from kv_serve.vllm.rows import RowsBuilder
from kv_serve.vllm.shape import first_heads, kept_specs
from kv_serve.vllm.slots import SlotBuilder
from kv_serve.vllm.spec import PagedSpec, register
from kv_transformers.fitted import expect_fitted, fingerprint_at
from kv_transformers.models.mark import mark_of

# Default block size when blocks cover pages: finer than vLLM's own default. A page of a later tier
# has as many bytes, and a decode step reads pages of both.
BLOCK_TOKENS: Final = 16
TIERED_BLOCK_TOKENS: Final = 32

logger = init_logger("vllm.kv_serve")


@dataclass(frozen=True)
class VllmSlots:
    """A token is stored in its vLLM slot."""

    format: TokenFormat
    full: int  # bytes of an uncompressed token per KV head
    config: VllmConfig = field(repr=False, compare=False)
    bases: Bases | None = field(default=None, repr=False, compare=False)

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
        most = max(each.page_size_bytes for each in kept.values())
        token_bytes = own.page_size_bytes // given
        tokens, nbytes = fit_block(given, token_bytes, most, spec.num_kv_heads)
        chunks = any(isinstance(each, ChunkedLocalAttentionSpec) for each in kept.values())
        if chunks and given % tokens and self.config.cache_config.enable_prefix_caching:
            raise UnservableError(
                "layers of this model attend to chunks, so vLLM finds prefixes only if the blocks "
                "of all layers have equally many tokens, and those of a smaller format have more; "
                "set enable_prefix_caching to false (--no-enable-prefix-caching)"
            )
        padded = None if nbytes == tokens * token_bytes else nbytes
        return replace(own, block_size=tokens, page_size_padded=padded)

    def layer(
        self,
        index: int,
        scale: float,
        backend: str,
        softcap: float | None,
        sinks: Float[Tensor, "H G"] | None,
    ) -> SlotLayer:
        """Return the attention of a layer.

        Raises:
            ValueError: the basis shifts keys, and the layer's logits have a bound or sinks.
        """
        basis = LayerBasis() if self.bases is None else self.bases.layer(index)
        return SlotLayer(self.format, scale, backend, softcap, sinks, basis)

    def __str__(self) -> str:
        """Describe the storage for the log."""
        return f"{self.format.nbytes} bytes per token and KV head in place of {self.full}"


@dataclass(frozen=True)
class BilledPages:
    """Tokens are stored in pages per layer and KV head; each block covers some pages."""

    policy: KVPolicy
    shape: CacheShape
    block_tokens: int | None  # set by the user, or None
    full: int
    config: VllmConfig = field(repr=False, compare=False)
    # Beside other layers, by the block size that was given and the bytes of their blocks.
    _made: dict[tuple[int, int], PagedSpec] = field(default_factory=dict, repr=False, compare=False)

    builder: ClassVar[type[AttentionMetadataBuilder]] = RowsBuilder

    def __post_init__(self) -> None:
        """Check that all ranks lay out pages alike.

        Raises:
            UnservableError: the ranks of tensor parallelism would not.
            ValueError: the policy reads by bounds that cannot be kept, as for `Layout.of`.
        """
        self._account(self.page_tokens, self.page_tokens)

    @property
    def page_tokens(self) -> int:
        """Tokens of the first tier per page, if no layers beside need others."""
        tiers = len(tier_formats(self.policy, self.shape))
        return self.block_tokens or (BLOCK_TOKENS if tiers == 1 else TIERED_BLOCK_TOKENS)

    def spec(self, spec: FullAttentionSpec) -> AttentionSpec:
        """Return the spec of a layer's share of a block.

        To size the blocks of states, vLLM asks for a spec of one token, here of the first tier.

        Raises:
            UnservableError: vLLM would manage the other layers otherwise.
        """
        kept = kept_specs(self.config)
        if not kept:
            return self._alone(spec)
        given = self.config.cache_config.block_size
        if spec.block_size != given:
            cells = self.shape.layers * spec.num_kv_heads
            share = -(-self.layout(self.page_tokens).token_bytes // cells)
            return replace(spec, dtype=torch.uint8, state_content_bytes=share)
        most = max(each.page_size_bytes for each in kept.values())
        if (given, most) not in self._made:  # equal for all layers
            self._made[given, most] = self._beside(spec, kept, most)
        return self._made[given, most]

    def _alone(self, spec: FullAttentionSpec) -> PagedSpec:
        tokens = self.page_tokens
        account = self._account(tokens, tokens)
        cells = self.shape.layers * spec.num_kv_heads * tokens
        share = -(-account.block_bytes // cells)
        return _paged(spec, tokens, share, account.holding(share * cells))

    def _beside(
        self, spec: FullAttentionSpec, kept: Mapping[str, KVCacheSpec], most: int
    ) -> PagedSpec:
        """Return a spec with blocks of whole pages, about as large as those of other layers."""
        self._check_others(kept)
        names = drafting_layers(self.config)
        if names:
            beside = Counter(spec for name, spec in kept.items() if name not in names).values()
            given = (spec for name, spec in kept.items() if name in names)
            check_drafters(given, [self.shape.layers, *beside], self.policy)
        tokens, wanted = spec.block_size, self.page_tokens
        sizes = {n: self.layout(n).page_bytes for n in range(max(1, wanted // 2), 2 * wanted + 1)}
        page_tokens, nbytes = fit_page(sizes, wanted, most)
        account = self._account(tokens, page_tokens)
        share = nbytes // (spec.num_kv_heads * tokens)
        unused = nbytes > share * spec.num_kv_heads * tokens
        account = account.holding(self.shape.layers * nbytes)
        return _paged(spec, tokens, share, account, nbytes if unused else None, kept=True)

    def _check_others(self, kept: Mapping[str, KVCacheSpec]) -> None:
        wrong, states = None, any(isinstance(each, MambaSpec) for each in kept.values())
        if self.config.scheduler_config.disable_hybrid_kv_cache_manager:
            wrong = "without vLLM's hybrid KV cache manager; leave it enabled"
        elif states and self.config.speculative_config is not None:
            wrong = "with speculative decoding in layers with states; omit the speculative_config"
        elif states and self.config.cache_config.enable_prefix_caching:
            wrong = (
                "with prefix caching in layers with states; set enable_prefix_caching to false "
                "(--no-enable-prefix-caching)"
            )
        if wrong is not None:
            drafting = kept.keys() <= drafting_layers(self.config)
            others = "draft" if drafting else "of this model have a window or state of their own"
            raise UnservableError(
                f"layers {others}, and {self.policy} is not served beside them {wrong}"
            )

    def layout(self, page_tokens: int, shape: CacheShape | None = None) -> Layout:
        """Return the pages of this device, or of a shard of the heads, of `page_tokens` tokens."""
        shape = shape or self.shape
        basis = self.policy.basis
        bases = None if basis is None else Bases.of(basis, shape, torch.device("cpu"))
        return Layout.of(self.policy, shape, bases, page_tokens, pooled=True)

    def _account(self, block_tokens: int, page_tokens: int) -> Account:
        firsts = {*first_heads(self.config), self.shape.first_head}
        shapes = [replace(self.shape, first_head=first) for first in firsts]
        layouts = [self.layout(page_tokens, shape) for shape in shapes]
        account, *others = {Account.of(each, block_tokens, page_tokens) for each in layouts}
        if others:
            raise UnservableError(
                f"the policy {self.policy} cannot be served with tensor parallelism: its heads "
                "keep different numbers of dimensions, but vLLM's blocks have one size on every "
                "rank"
            )
        return account

    def layer(
        self,
        index: int,
        scale: float,
        backend: str,
        softcap: float | None,
        sinks: Float[Tensor, "H G"] | None,
    ) -> PageLayer:
        """Return the attention of a layer.

        Raises:
            ValueError: the basis shifts keys, and the layer's logits have a bound or sinks.
        """
        if self.policy.basis is not None:
            check_shift(self.policy, self.policy.basis.bind(index, self.shape).key, softcap, sinks)
        return PageLayer(index, softcap, None if sinks is None else sinks.flatten())

    def __str__(self) -> str:
        """Describe the storage for the log."""
        layout = self.layout(self.page_tokens)
        each = layout.token_bytes / sum(map(len, layout.kind))
        page = layout.pages[0][0]
        what = "codes of keys" if page.coded else "bounds"
        bounds = f", and {page.bound_bytes} of {what} per page" if page.bounds else ""
        return f"at most {each:g} bytes per kept token and KV head in place of {self.full}{bounds}"


def stored(config: VllmConfig, policy: KVPolicy, shape: CacheShape) -> VllmSlots | BilledPages:
    """Choose the storage of a policy, and attach our connector if it uses pages.

    Raises:
        UnservableError: our connector is configured for a policy without pages; another one, or
            speculative decoding, is not supported with this model; or the ranks of tensor
            parallelism would lay out their pages differently.
        WrongModelError: the policy was calibrated with another model.
    """
    full = shape.token_bytes // (shape.layers * shape.kv_heads)
    if policy.fitted_to is not None:
        model = config.model_config
        expect_fitted(policy, fingerprint_at(model.model), mark_of(model.hf_config))
    format = plain_format(policy, shape)
    if format is not None:
        if is_ours(config.kv_transfer_config):
            raise UnservableError(
                f"{policy} is stored in vLLM's slots and needs no KV connector; omit "
                "--kv-transfer-config"
            )
        _check_beside(config, policy)
        device = torch.device(config.device_config.device_type)
        bases = None if policy.basis is None else Bases.of(policy.basis, shape, device)
        return VllmSlots(format, full, config, bases)
    _refuse(policy, refused_drafts(config, policy, plain=False))  # the shape decides what is plain
    attach(config)
    register()
    cache = config.cache_config
    if cache.enable_prefix_caching:
        logger.info(
            "vLLM's blocks do not hold the tokens of %s, so no prefix is found by its blocks; "
            "stored are prefixes that requests name by %s, and with %s those of finished requests",
            policy,
            PREFIX,
            TURNS,
        )
    own = cache.block_size if cache.user_specified_block_size else None
    return BilledPages(policy, shape, own, full, config)


def _check_beside(config: VllmConfig, policy: KVPolicy) -> None:
    kept = kept_specs(config)
    states = any(isinstance(each, MambaSpec) for each in kept.values())
    refused = refused_kept(config, states=states) if kept else claim_folder(config, str(policy))
    _refuse(policy, refused)


def _refuse(policy: KVPolicy, refused: str | None) -> None:
    if refused is not None:
        raise UnservableError(f"the policy {policy} cannot be served with {refused}")


def _paged(
    spec: FullAttentionSpec,
    tokens: int,
    share: int,
    account: Account,
    padded: int | None = None,
    *,
    kept: bool = False,
) -> PagedSpec:
    return PagedSpec(
        block_size=tokens,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        dtype=torch.uint8,
        state_content_bytes=share,
        page_size_padded=padded,
        account=account,
        kept=kept,
    )
