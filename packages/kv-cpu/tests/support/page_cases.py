"""Random formats, and pairs of caches written by native code and by torch."""

from collections.abc import Callable

from hypothesis import strategies as st

import page_twins
from kv_paging import PagePool, PerHeadRankTiers, Tiers, TokenStore
from kv_policy import Codec, PageLayout, RawCodec, TokenFormat
from kv_quant import CodebookCodec, IntegerCodec
from page_twins import DTYPES, Twins


def integers(dim: int) -> st.SearchStrategy[IntegerCodec]:
    group = st.one_of(st.just(0), st.integers(1, dim + 2))
    return st.builds(IntegerCodec, st.just(dim), st.sampled_from([8, 4, 3, 2, 1]), group)


def codecs(dim: int) -> st.SearchStrategy[Codec]:
    raw = st.builds(RawCodec, st.just(dim), st.sampled_from(DTYPES))
    levels = st.builds(CodebookCodec, st.just(dim), st.sampled_from([4, 3, 2, 1]))
    return st.one_of(integers(dim), integers(dim), levels, raw)


DIMS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128, 130, 257]))
FORMATS = st.tuples(DIMS, DIMS).flatmap(
    lambda dims: st.builds(TokenFormat, codecs(dims[0]), codecs(dims[1]))
)


def twins(make: Callable[[PagePool], TokenStore | Tiers | PerHeadRankTiers], nbytes: int) -> Twins:
    """Return twins, of which native code writes the second's pages."""
    return Twins(make, nbytes, "cpu")


def one_store(layout: PageLayout, table_rows: int = 3) -> Twins:
    """Return twins of a store."""
    return page_twins.one_store(layout, table_rows, "cpu")
