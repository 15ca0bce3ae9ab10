import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evict_cases import plan_view, quick, step
from kv_evict import Streaming
from kv_policy import DROP, Budget, CacheShape, LayerView, parse
from kv_policy.testing import check_policy

SHAPE = CacheShape(layers=1, kv_heads=1, group=1, key_dim=4, value_dim=4)


class Host:
    """One head of one sequence, as plain lists."""

    def __init__(self, policy: Streaming) -> None:
        self.policy = policy
        self.seen = 0
        self.held: dict[int, float] = {}

    @property
    def kept(self) -> list[int]:
        return list(self.held)

    @property
    def budget(self) -> int:
        return int(self.policy.budget.amount)

    def score(self, positions: list[int], fresh: int) -> list[float]:
        held = len(positions) - fresh
        view = LayerView(
            layer=torch.tensor([0]),
            shape=SHAPE,
            position=torch.tensor([[positions]]),
            fresh=(torch.arange(len(positions)) >= held)[None, None],
            score=torch.zeros(1, 1, len(positions)),
            length=torch.tensor([self.seen]),
        )
        return self.policy.score(view)[0, 0].tolist()

    def prompt(self, tokens: int) -> None:
        positions = [*self.kept, *range(self.seen, self.seen + tokens)]
        self.seen += tokens
        scores = self.score(positions, tokens)
        lead = (1, 1, 1, len(positions))
        place, score = torch.tensor(positions).view(lead), torch.tensor(scores).view(lead)
        plan = self.policy.plan(plan_view(score, place, [self.seen], [self.budget]))
        stay = (plan != DROP).flatten().tolist()
        every = zip(positions, scores, stay, strict=True)
        self.held = {p: x for p, x, s in every if s}

    def generate(self) -> None:
        position, self.seen = self.seen, self.seen + 1
        (score,) = self.score([position], 1)
        scores = {**self.held, position: score}
        stay = step(self.policy, self.held, position, score, self.budget)
        self.held = {p: scores[p] for p in stay}


def sinks_and_recent(seen: int, sinks: int, budget: int) -> list[int]:
    if seen <= budget:
        return list(range(seen))
    return [*range(sinks), *range(seen - (budget - sinks), seen)]


@given(
    st.integers(0, 5),
    st.integers(1, 9),
    st.lists(st.integers(1, 12), max_size=4),
    st.integers(0, 20),
)
@quick
def test_sinks_and_recent_tokens_stay_at_every_moment(sinks, more, chunks, generated):
    policy = Streaming(budget=Budget(sinks + more), sinks=sinks)
    host = Host(policy)
    for chunk in chunks:
        host.prompt(chunk)
        assert host.kept == sinks_and_recent(host.seen, sinks, sinks + more)
    for _ in range(generated):
        host.generate()
        assert host.kept == sinks_and_recent(host.seen, sinks, sinks + more)


def test_scores_are_positions_and_sinks_are_infinite():
    view = LayerView(
        layer=torch.zeros_like(torch.tensor([91, 2**24])),
        shape=SHAPE,
        position=torch.tensor([[[0, 3, 4, 90, -1]], [[0, 1, 2, 3, 2**24 - 1]]]),
        fresh=torch.zeros(2, 1, 5, dtype=torch.bool),
        score=torch.zeros(2, 1, 5),
        length=torch.tensor([91, 2**24]),
    )
    inf = torch.inf
    expected = [[[inf, inf, 4, 90, -1]], [[inf, inf, inf, inf, 2**24 - 1]]]
    assert Streaming().score(view).tolist() == expected


@pytest.mark.parametrize(
    "policy",
    [
        Streaming(),
        Streaming(Budget(9), sinks=0),
        Streaming(Budget(25, "percent"), sinks=8),
        Streaming(Budget(9), chunks=True),
    ],
)
def test_the_contract_holds(policy):
    check_policy(policy)


def test_what_it_says_of_itself():
    policy = Streaming(Budget(64), sinks=6)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (7, "step", "layer", 1)
    assert policy.observe.last == 0
    assert not policy.reads
    assert policy.capabilities.shortens
    assert policy.capabilities.splits_heads
    assert "Xiao" in policy.source


def test_text_form():
    assert parse("streaming") == Streaming()
    assert str(Streaming(Budget(64), sinks=2)) == "streaming:budget=64,sinks=2"
    assert parse("streaming:budget=64,sinks=2") == Streaming(Budget(64), sinks=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming:budget=4", "a budget of 4 tokens is smaller than the 5 it protects"),
        ("streaming:sinks=-1", "streaming: sinks=-1 is refused"),
        (
            "streaming:window=4",
            "streaming has no parameter 'window'; its parameters: budget, sinks, chunks",
        ),
        ("streaming:keep=25%,chunks=true", "so it cannot keep 25% of it; give a number of tokens"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)
