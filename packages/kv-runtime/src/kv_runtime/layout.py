"""The page layout of a cache: its kinds of heads, and a layout per kind and tier."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kv_paging import PagePool, PerHeadRankTiers, Tiers, fit
from kv_policy import CacheShape, KVPolicy, PageLayout, Raw, complete, tier_formats
from kv_runtime.bases import Bases
from kv_runtime.window.base import RingBuffer, Window
from kv_runtime.window.dense import RawWindow
from kv_runtime.window.paged import PagedWindow
from kv_runtime.window.ragged import RaggedWindow


@dataclass(frozen=True)
class Layout:
    """Pages of equal size; heads with the same dimensions have the same tokens per page."""

    shape: CacheShape  # stored shape, with the dimensions of the longest vectors
    kind: tuple[tuple[int, ...], ...]  # kind of each layer and stored head
    shapes: tuple[CacheShape, ...]  # by kind
    pages: tuple[tuple[PageLayout, ...], ...]  # by kind and tier
    window: int

    @classmethod
    def of(
        cls,
        policy: KVPolicy,
        shape: CacheShape,
        bases: Bases | None,
        page_tokens: int,
        *,
        pooled: bool = False,
    ) -> "Layout":
        """Lay out pages for about `page_tokens` first-tier tokens with the longest vectors.

        Args:
            policy: the policy.
            shape: the shape of the model's cache, or of a shard of its heads.
            bases: the bases of the policy; None: it has none.
            page_tokens: tokens of the first tier per page.
            pooled: whether caches share a pool; then pages hold the bounds of their keys, if the
                policy reads by them, so that the pool accounts for them.

        Raises:
            ValueError: the policy reads by bounds that cannot be kept, as heads are stored with
                different ranks, or there are several tiers; or no page fits.
        """
        stored = shape if bases is None else bases.stored
        kind: tuple[tuple[int, ...], ...] = ((0,) * stored.kv_heads,) * stored.layers
        shapes: tuple[CacheShape, ...] = (stored,)
        if bases is not None:
            kind, shapes = bases.kinds
        _expect_bounds(policy, len(shapes))
        reading, extra = policy.reading, policy.selector is not None
        bounds, coded = pooled and reading is not None, pooled and bool(reading and reading.coded)
        formats = [form for each in shapes for form in tier_formats(policy, each)]
        pages = fit(formats, page_tokens, extra, extra, bounds, coded)
        tiers = len(formats) // len(shapes)
        window = policy.formats.window if policy.formats is not None else 0
        split = tuple(pages[i : i + tiers] for i in range(0, len(pages), tiers))
        return cls(stored, kind, shapes, split, window)

    @property
    def page_bytes(self) -> int:
        """Bytes per page."""
        return self.pages[0][0].nbytes

    @property
    def page_tokens(self) -> Int[Tensor, "K N H"]:
        """Tokens per page of each tier, layer and head."""
        tokens = torch.tensor([[layout.tokens for layout in tiers] for tiers in self.pages])
        return tokens[torch.tensor(self.kind)].permute(2, 0, 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token of the first tier, over all layers and heads."""
        return round(sum(self.pages[k][0].token_bytes for layer in self.kind for k in layer))

    @property
    def digest(self) -> str | None:
        """Digest of what codecs took from a file, such as fitted levels; None: nothing."""
        found = [page.format.digest for tiers in self.pages for page in tiers]
        each = [digest for digest in found if digest is not None]
        return " ".join(dict.fromkeys(each)) or None

    def tokens_of(self, pages: int) -> int:
        """Estimate the first-tier tokens in `pages` pages, averaged over layers and heads."""
        return pages * int(self.page_tokens[0].sum()) // self.page_tokens[0].numel()

    def attends_rows(self, policy: KVPolicy, shape: CacheShape, bases: Bases | None) -> bool:
        """Whether a backend may decode on an engine's rows, whose heads are those that are stored.

        A selector that scores tokens once reads vectors that are not projected, and pages are
        selected by queries that are.
        """
        if bases is None:
            return not shape.value_in_key
        if policy.reading is not None:
            return False
        once = policy.selector is not None and complete(policy.selector).scores_once
        return self.shape.kv_heads == shape.kv_heads and not once

    def expect_same(self, other: "Layout") -> None:
        """Raise if another layout differs.

        Raises:
            ValueError: the layouts differ.
        """
        if self != other:
            raise ValueError(
                "the batches have different page layouts; both need the same policy, shape and "
                "page size"
            )

    def stored_pages(self, kind: int) -> tuple[PageLayout, ...]:
        """Return the page layout of each store of a kind's tiers: blocks have a residual beside."""
        (raw,) = tier_formats(Raw(), self.shapes[kind])
        found: list[PageLayout] = []
        for page in self.pages[kind]:
            found.append(page)
            if page.format.block > 1:
                found.append(PageLayout.fitted(raw, page.nbytes, page.scores, page.positions))
        return tuple(found)

    def window_tensors(self, sequences: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of what `Window.tensors` names, without allocating a window."""
        if not self.window:
            return {}
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for i, shape in enumerate(self.shapes):
            layers, heads, name = shape.layers, shape.kv_heads, ""
            if len(self.shapes) > 1:
                layers, heads, name = sum(row.count(i) for row in self.kind), 1, f"{i}."
            lead = (layers, sequences, heads, self.window)
            found[f"{name}key"] = shape.dtype, (*lead, shape.key_dim)
            if not shape.value_in_key:
                found[f"{name}value"] = shape.dtype, (*lead, shape.value_dim)
            if self.pages[i][0].scores:
                found[f"{name}score"] = torch.float32, lead
        return found

    def window_pages(self, kind: int) -> int:
        """Return the pages of a raw window per layer and head of a kind."""
        if not self.window:
            return 0
        return -(-self.window // self.window_layout(kind).tokens)

    def window_layout(self, kind: int) -> PageLayout:
        """Return the page layout of raw tokens in a kind's window."""
        (raw,) = tier_formats(Raw(), self.shapes[kind])
        return PageLayout.fitted(raw, self.page_bytes, self.pages[kind][0].scores)

    def tiers(self, pool: PagePool, sequences: int) -> Tiers | PerHeadRankTiers:
        """Create empty tiers over a pool."""
        raw = [tier_formats(Raw(), shape)[0] for shape in self.shapes]
        if len(self.shapes) > 1:
            return PerHeadRankTiers(pool, self.pages, torch.tensor(self.kind), sequences, raw=raw)
        shape = (self.shape.layers, sequences, self.shape.kv_heads)
        return Tiers(pool, self.pages[0], *shape, raw=raw[0])

    def raw_window(
        self,
        tiers: Tiers | PerHeadRankTiers,
        sequences: int,
        device: torch.device,
        scores: bool,
        in_pages: bool = False,
        *,
        vacant: bool = False,
    ) -> Window | None:
        """Create an empty raw window, if the policy has one; in separate memory or the tiers' pool.

        With `vacant`, sequences of a window in pages have none yet, as for `PagedWindow`.

        Raises:
            kv_paging.PoolExhausted: the pool has too few pages for it and cannot grow.
        """
        if not self.window:
            return None

        def rings(shape: CacheShape) -> RingBuffer:
            if in_pages:
                size = self.window
                return PagedWindow(tiers.pool, shape, sequences, size, scores, vacant=vacant)
            return RawWindow(shape, sequences, self.window, device, scores)

        if not isinstance(tiers, PerHeadRankTiers):
            return rings(self.shapes[0])
        each = zip(self.shapes, tiers.kinds.cells, strict=True)
        members = [rings(replace(shape, layers=cells, kv_heads=1)) for shape, cells in each]
        return RaggedWindow(tiers.kinds, members)


def _expect_bounds(policy: KVPolicy, kinds: int) -> None:
    if policy.reading is None:
        return
    if kinds > 1:
        raise ValueError(
            f"{policy} ranks pages by their keys, but its basis stores heads with {kinds} "
            "different ranks, for which this is not supported; use one of equal ranks, or omit one "
            "of the two"
        )
    if policy.formats is not None and policy.formats.tiers > 1:
        raise ValueError(
            f"{policy} ranks the pages of one format, and has {policy.formats.tiers}; "
            "use one format for all tokens, such as k8v4"
        )
