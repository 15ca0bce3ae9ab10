"""How many pages a decode step reads, and with what that combines."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_policy import (
    Budget,
    CompositionError,
    Evictor,
    KVPolicy,
    LayerView,
    Observe,
    PageReading,
    Part,
    compose,
)
from kv_policy.raw import Raw
from kv_policy.testing import check_policy


@dataclass(frozen=True)
class Reads(Part):
    name: ClassVar[str] = "reads"
    budget: Budget = Budget(25, "percent")

    @property
    def reading(self) -> PageReading:
        return PageReading(self.budget)


@dataclass(frozen=True)
class Recent(Evictor):
    name: ClassVar[str] = "recent"
    observes: bool = False

    @property
    def observe(self) -> Observe:
        return Observe(1, generated=self.observes)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.position.float()


@dataclass(frozen=True)
class Moving(Recent):
    name: ClassVar[str] = "moving"
    decode = "step"
    decodes_on_device = True


def test_nothing_else_ranks_pages() -> None:
    reading = PageReading(Budget(1))
    object.__setattr__(reading, "by", "keys")  # as without checks of types
    with pytest.raises(ValueError, match=r"^by is 'keys'; pages are ranked by bounds or codes$"):
        reading.__post_init__()


@given(st.integers(0, 5000), st.floats(0.01, 100), st.integers(1, 64))
def test_a_share_is_rounded_up_to_whole_pages(held: int, share: float, tokens: int) -> None:
    reading = PageReading(Budget(share, "percent"))
    found = int(reading.pages(torch.tensor(held), tokens))
    assert held * share / 100 - 1e-5 <= found < held * share / 100 + 1
    assert found <= held


@given(st.integers(0, 5000), st.integers(1, 9000), st.integers(1, 64))
def test_tokens_are_rounded_up_to_whole_pages(held: int, budget: int, tokens: int) -> None:
    found = int(PageReading(Budget(budget)).pages(torch.tensor(held), tokens))
    assert found == min(held, -(-budget // tokens))


SHARES = st.one_of(st.integers(1, 100), st.floats(0.01, 100), st.sampled_from([12.5, 100 / 3]))


@given(
    st.integers(0, 9000),
    st.builds(Budget, SHARES, st.just("percent")) | st.builds(Budget, st.integers(1, 9999)),
    st.integers(1, 64),
)
def test_the_host_counts_as_the_device(held: int, budget: Budget, tokens: int) -> None:
    reading = PageReading(budget)
    found = [reading.pages_of(each, tokens) for each in (held, held + 1)]
    assert found == reading.pages(torch.tensor([held, held + 1]), tokens).tolist()
    assert found[0] <= found[1]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^5B is a number of bytes; give tokens per KV head"):
        PageReading(Budget(5, "bytes"))
    with pytest.raises(ValueError, match=r"^last is -1; give 0 or more$"):
        PageReading(Budget(5), last=-1)


def test_a_reading_is_a_facet_of_its_own() -> None:
    policy = compose(Reads(), Raw(), Recent())
    assert isinstance(policy, KVPolicy)
    assert policy.reading == PageReading(Budget(25, "percent"))
    assert str(policy) == "recent+raw+reads"
    assert Reads.facets() == ("reading",)
    assert compose(Raw()).reading is None
    check_policy(Reads())
    check_policy(policy)
    with pytest.raises(CompositionError, match=r"both define which pages are read; keep one"):
        compose(Reads(), Reads(Budget(5)))


@pytest.mark.parametrize(
    ("selector", "why"),
    [
        (Recent(observes=True), "recent:observes=true observes the attention of generated queries"),
        (Moving(), "moving evicts or moves a stored token in each decode step"),
    ],
)
def test_selectors_that_need_every_token_are_refused(selector: Part, why: str) -> None:
    with pytest.raises(CompositionError, match=f"^reads reads some pages .* {why}"):
        compose(selector, Reads())


def test_a_reading_that_reads_nothing_violates_a_law() -> None:
    class Nothing(PageReading):
        def pages(self, held: torch.Tensor, tokens: int) -> torch.Tensor:
            return held * 0

    @dataclass(frozen=True)
    class Idle(Reads):
        @property
        def reading(self) -> PageReading:
            return Nothing(Budget(1))

    with pytest.raises(AssertionError, match=r"reads no page of a head that holds some"):
        check_policy(Idle())
