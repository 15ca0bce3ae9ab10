from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

import pytest
import torch

from kv_policy import (
    Basis,
    Budget,
    CacheShape,
    Capabilities,
    CompositionError,
    Evictor,
    Formats,
    HeadBasis,
    KVPolicy,
    LayerBasis,
    LayerView,
    Part,
    RawCodec,
    TokenFormat,
    compose,
    tier_formats,
)
from kv_policy.raw import Raw, Uncompressed

SHAPE = CacheShape(layers=2, kv_heads=2, group=2, key_dim=8, value_dim=4)


@dataclass(frozen=True)
class Recent(Evictor):
    name: ClassVar[str] = "recent"

    def score(self, view: LayerView) -> torch.Tensor:
        return view.position.float()


@dataclass(frozen=True)
class Sorted(Recent):
    name: ClassVar[str] = "sorted"

    @property
    def tiers(self) -> int:
        return 2


@dataclass(frozen=True)
class Half(Uncompressed):
    name: ClassVar[str] = "half"
    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class Two(Part):
    name: ClassVar[str] = "two"
    tiers: ClassVar[int] = 2
    window: ClassVar[int] = 4

    @property
    def formats(self) -> Formats:
        return self

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(rolls_back=False)

    def bind(self, shape: CacheShape) -> tuple[TokenFormat, ...]:
        return Half().bind(shape) + Raw().bind(shape)


@dataclass(frozen=True)
class Same(Part):
    name: ClassVar[str] = "same"

    @property
    def basis(self) -> Basis:
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        matrix = torch.eye(shape.key_dim).expand(shape.kv_heads, -1, -1)
        return LayerBasis(key=HeadBasis(matrix, (shape.key_dim,) * shape.kv_heads))


@dataclass(frozen=True)
class Nothing(Part):
    name: ClassVar[str] = "nothing"


@dataclass(frozen=True)
class Whole(Recent):
    """Supplies two facets by itself."""

    name: ClassVar[str] = "whole"

    @property
    def formats(self) -> Formats:
        return Half()


@dataclass(frozen=True)
class SortedWhole(Sorted):
    """Sorts into two tiers and supplies their formats."""

    name: ClassVar[str] = "sorted-whole"

    @property
    def formats(self) -> Formats:
        return Two()


@pytest.mark.parametrize(
    "parts",
    [
        (Recent(), Half(), Same()),
        (Sorted(), Two()),
        (Whole(), Same()),
        (Recent(), SortedWhole(), Same()),
        (Recent(), Sorted(), Two()),
    ],
)
def test_order_does_not_matter(parts: tuple[KVPolicy, ...]) -> None:
    composed = {compose(*order) for order in permutations(parts)}
    assert len(composed) == 1
    assert len({str(policy) for policy in composed}) == 1


def test_one_that_evicts_and_one_that_sorts_select_together() -> None:
    policy = compose(SortedWhole(), Recent(Budget(7)))
    assert str(policy) == "recent:budget=7+sorted-whole"
    selector = policy.selector
    assert selector is not None
    assert (selector.tiers, selector.budget) == (2, Budget(7))
    assert policy.formats == Two()
    with pytest.raises(
        CompositionError, match="recent and whole both define which tokens are kept"
    ):
        compose(Recent(), Whole())
    with pytest.raises(CompositionError, match="both define which tokens are kept"):
        compose(Sorted(), SortedWhole())


def test_a_composition_is_a_policy_with_each_parts_facet() -> None:
    policy = compose(Half(), Same(), Recent())
    assert isinstance(policy, KVPolicy)
    assert (policy.selector, policy.formats, policy.basis) == (Recent(), Half(), Same())
    assert str(policy) == "same+recent+half"


def test_compositions_are_composed_again() -> None:
    assert compose(compose(Recent(), Half()), Same()) == compose(Same(), Half(), Recent())
    assert compose(Half()) is compose(Half()) or compose(Half()) == Half()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Recent(), Whole()), "recent and whole both define which tokens are kept"),
        ((Half(), Raw()), "half and raw both define how tokens are stored"),
        (
            (Same(), Recent(), Same()),
            "same and same both define the basis in which vectors are stored",
        ),
        ((Half(), Recent(), Whole()), "recent and whole both define which tokens are kept"),
        ((Nothing(), Half()), "nothing supplies no selector, no formats, no basis and no reading"),
        ((), "nothing to compose; name at least one policy"),
        ((Sorted(), Half()), r"sorted sends tokens to 2 tier\(s\) and half has formats for 1"),
        ((Recent(), Two()), r"recent sends tokens to 1 tier\(s\) and two has formats for 2"),
        ((Sorted(),), r"sorted sends tokens to 2 tier\(s\) and raw storage has formats for 1"),
        ((Two(),), r"keeping every token sends tokens to 1 tier\(s\) and two has formats for 2"),
    ],
)
def test_conflicts_are_sentences_that_name_the_parts(
    parts: tuple[KVPolicy, ...], message: str
) -> None:
    for order in permutations(parts):
        with pytest.raises(CompositionError) as error:
            compose(*order)
        if order == parts:
            assert error.match(message)


def test_capabilities_are_those_of_all_parts() -> None:
    both = compose(Sorted(), Two()).capabilities
    assert both == Capabilities(shortens=True, shares_prefixes=False, rolls_back=False)
    assert compose(Half()).capabilities == Capabilities()
    able, unable = Capabilities(), Capabilities(True, False, False, False)
    assert able & able == able
    assert able & unable == unable & able == unable & unable == unable


def test_formats_are_raw_where_nobody_says() -> None:
    raw = TokenFormat(RawCodec(8, torch.bfloat16), RawCodec(4, torch.bfloat16))
    assert tier_formats(Recent(), SHAPE) == (raw,)
    assert tier_formats(compose(Sorted(), Two()), SHAPE)[1] == raw
    assert [format.nbytes for format in tier_formats(Half(), SHAPE)] == [24]
