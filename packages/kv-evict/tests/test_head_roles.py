"""RazorAttention and DuoAttention: heads that retrieve keep all, the others both ends."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evict_cases import plan_view, ragged, shape
from evict_cases import step as stepped
from heads_cases import scores_of, written
from kv_evict import Duo, Razor
from kv_evict.head_roles import HeadRoles
from kv_evict.heads_file import HeadScores, save
from kv_policy import DROP, LayerView, parse
from kv_policy.testing import check_policy

laws = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
LENGTHS = (40, 13)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Scores of a model with two layers of three KV heads."""
    return written(tmp_path / "heads", 2, 3)


@given(
    seed=st.integers(0, 999),
    share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    sinks=st.integers(0, 5),
    recent=st.integers(1, 20),
    part=st.sampled_from([0.0, 0.25, 0.5]),
)
@laws
def test_heads_that_retrieve_keep_all_and_the_others_both_ends(
    file: str, seed: int, share: float, sinks: int, recent: int, part: float
) -> None:
    policy = Razor(file=file, share=share, echo=0.2, sinks=sinks, recent=recent, part=part)
    position = ragged(seed, 2, LENGTHS, (20, 5))
    plan = policy.plan(plan_view(torch.rand(position.shape), position, LENGTHS, LENGTHS))
    marked = scores_of(2, 3).retrieving((("induction", share), ("echo", 0.2)), torch.device("cpu"))
    for n, b, h in torch.cartesian_prod(*map(torch.arange, position.shape[:3])).tolist():
        held = [p for p in position[n, b, h].tolist() if p >= 0]
        newest = LENGTHS[b] - max(recent, int(LENGTHS[b] * part))
        kept = position[n, b, h][plan[n, b, h] != DROP].tolist()
        ends = [p for p in held if p < sinks or p >= newest]
        assert kept == (held if marked[n, h] else ends)


def test_duo_goes_by_the_error_of_outputs(file: str) -> None:
    policy = Duo(file=file, share=0.5, sinks=1, recent=2)
    position = ragged(0, 2, LENGTHS, (0, 0))
    plan = policy.plan(plan_view(torch.rand(position.shape), position, LENGTHS, LENGTHS))
    marked = scores_of(2, 3).retrieving((("loss", 0.5),), torch.device("cpu"))
    assert marked.sum() == 3
    kept = (plan != DROP).sum(-1)
    for b, length in enumerate(LENGTHS):
        assert torch.equal(kept[:, b], torch.where(marked, length, 3))


def view_of(position: list[int], length: int) -> LayerView:
    place = torch.tensor([[position] * 3])
    return LayerView(
        layer=torch.tensor([0]),
        shape=shape(2),
        position=place,
        fresh=place >= 0,
        score=torch.zeros(place.shape),
        length=torch.tensor([length]),
    )


def test_a_score_is_the_position_and_infinite_for_a_sink(file: str) -> None:
    score = Razor(file=file, sinks=2).score(view_of([0, 1, 5, 9, -1], 10))
    assert score[0, 0, :4].tolist() == [torch.inf, torch.inf, 5, 9]


@pytest.fixture
def lone(tmp_path: Path) -> str:
    """Scores of a model with one layer, whose only first head retrieves."""
    found = scores_of(1, 3)
    one = torch.tensor([[1.0, 0.0, 0.0]])
    save(tmp_path / "lone", HeadScores(found.facts, {kind: one.clone() for kind in found.scores}))
    return str(tmp_path / "lone")


def by_hand(policy: HeadRoles, held: dict[int, float], at: int) -> list[int]:
    return stepped(policy, held, at, float(at), budget=at + 1)


def test_a_step_evicts_the_oldest_that_is_not_among_the_newest(lone: str) -> None:
    none = Duo(file=lone, share=0.0, sinks=2, recent=3)
    held = {0: torch.inf, 1: torch.inf, 7: 7.0, 8: 8.0, 9: 9.0}
    assert by_hand(none, held, 10) == [0, 1, 8, 9, 10]
    assert by_hand(none, {0: torch.inf, 9: 9.0}, 10) == [0, 9, 10]
    every = Duo(file=lone, share=1.0, sinks=2, recent=3)
    assert by_hand(every, held, 10) == [0, 1, 7, 8, 9, 10]


def test_the_newest_grow_with_the_sequence(lone: str) -> None:
    policy = Razor(file=lone, share=0.0, echo=0.0, sinks=0, recent=2, part=0.5)
    held = {i: float(i) for i in range(5, 10)}
    for at in range(10, 40):
        kept = by_hand(policy, held, at)
        assert kept == list(range(at + 1 - (at + 1) // 2, at + 1))
        held = {p: float(p) for p in kept}


def test_roles_of_a_shard_are_those_of_its_heads(file: str) -> None:
    policy = Duo(file=file, share=0.5, sinks=0, recent=1)
    position = ragged(1, 2, LENGTHS, (0, 0))
    view = plan_view(torch.rand(position.shape), position, LENGTHS, LENGTHS)
    whole = policy.plan(view)
    part = replace(
        view,
        shape=replace(view.shape, kv_heads=2, first_head=1),
        score=view.score[:, :, 1:],
        position=view.position[:, :, 1:],
        tier=view.tier[:, :, 1:],
    )
    assert torch.equal(policy.plan(part), whole[:, :, 1:])


@pytest.mark.parametrize(
    "text",
    [
        "duo:file=F",
        "duo:file=F,share=0.25,sinks=0,recent=7",
        "razor:file=F",
        "razor:file=F,share=0.3,echo=0.2,sinks=2,recent=9,part=0.0",
    ],
)
def test_the_contract_holds(tmp_path: Path, text: str) -> None:
    file = written(tmp_path / "four", 2, 4)  # those of the shape that it is checked with
    kind = Duo if text.startswith("duo") else Razor
    _, _, options = text.partition(":")
    values = dict(item.split("=") for item in options.split(","))
    check_policy(kind.from_text(values | {"file": file}))


def test_what_it_says_of_itself(file: str) -> None:
    policy = Razor(file=file)
    assert policy.fitted_to == "0123456789abcdef"
    assert policy.budget is None
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (
        260,
        "step",
        "layer",
        1,
    )
    assert policy.capabilities.splits_heads
    assert policy.capabilities.shortens
    assert policy.observe.last == 0


def test_text_form(file: str) -> None:
    policy = Razor(file=file, share=0.25, recent=64)
    assert str(policy) == f"razor:file={file},share=0.25,recent=64"
    assert parse(str(policy)) == policy
    assert parse(f"duo:file={file}") == Duo(file=file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("razor", "razor needs file=..., which has no default"),
        ("razor:file=F,share=1.1", "razor: share=1.1 is refused"),
        ("razor:file=F,part=-1", "razor: part=-1 is refused"),
        ("duo:file=F,recent=0", "duo: recent=0 is refused"),
        ("duo:file=F,budget=9", "duo has no parameter 'budget'; its parameters: file, share"),
        ("duo:file=none-there", "duo: none-there does not exist; write it with"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
