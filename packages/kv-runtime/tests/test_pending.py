"""Drafts of decoding requests: each attends as if decoded alone, and wrong ones leave no trace."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import Budget, Evictor, KVPolicy, LayerView, Replan, compose, parse
from kv_runtime import PolicyCache, RequestBatch, RequestStep, unlike_drafts
from requested import CHUNK, PROMPTS, SCALE, drawn, seen_alone, stepped
from tiered_policies import SHAPE, Exact, Turned

LONGEST = 48  # tokens of a request
RAGGED = Turned("6253", "154")  # each head of each layer has ranks of its own
POLICIES: dict[str, KVPolicy] = {
    "raw": parse("raw"),
    "window": parse("k4v2:window=5"),
    "wide-window": parse("k4v2:window=32"),  # no token leaves it
    "selector": parse("snapkv:budget=12,window=4+k4v2"),
    "short-window": parse("keydiff:keep=50%+k4v2:window=3"),
    "merged": parse("d2o:budget=9,every=0+k8v4"),
    "blocks": parse("k4v4:keys=channel,block=16"),
    "blocks-window": compose(parse("snapkv:budget=14,window=4"), Exact(1, 5, block=4)),
    "ranks": compose(parse("lagkv:keep=50%"), Exact(1, 5), RAGGED),
    "ranks-blocks": compose(Exact(1, 5, block=4), RAGGED),
}


@dataclass
class Engine:
    """Prefills in chunks, then decodes with drafts; what is right is drawn beforehand.

    `pages` is the size of the pool; `readers` further layers attend to each layer's keys.
    """

    policy: KVPolicy
    backend: str = "torch"
    readers: int = 0
    seed: int = 0
    told: dict[str, Exception] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROMPTS, 0))
    accepted: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        self.draw, noise = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        self.noise, self.tokens = noise, drawn(noise, LONGEST)

    @cached_property
    def pool(self) -> PagePool:
        size = PolicyCache(self.policy, SHAPE).layout.page_bytes
        return PagePool.over(torch.full((600, size), 255, dtype=torch.uint8), poison=True)

    @cached_property
    def batch(self) -> RequestBatch:
        given = {"backend": self.backend, "pool": self.pool, "careful": True}
        return RequestBatch(PolicyCache(self.policy, SHAPE, **given), SCALE, self.told.__setitem__)

    def brought(self, name: str, tokens: int, right: int) -> list[Tensor]:
        """The vectors of a request's next tokens, of which the first `right` are right."""
        done = self.computed[name]
        found = [x[:, done : done + tokens].clone() for x in self.tokens[name]]
        for x in found:
            x[:, right:] = torch.randn(x[:, right:].shape, generator=self.noise)
        return found

    def step(self, *names: str, most: int = 3, padded: bool = False, allowed: bool = False) -> dict:
        """Do a step with up to `most` drafts each; give what right tokens see, by layer.

        A prompt may be `padded` with drafts, and a request fail if that is `allowed`.
        """
        steps, vectors, rights = {}, [], {}
        for key, name in enumerate(names):
            done, prompt = self.computed[name], PROMPTS[name]
            drafts, right = 0, 0
            if done < prompt:
                count = min(CHUNK, prompt - done)
                drafts = most if padded and done + count == prompt else 0
            else:
                count = 1
                drafts = self.draw.randint(0, most)
                right = self.draw.randint(0, drafts)
            steps[key] = RequestStep(name, done, count + drafts, prompt, serial=key, drafts=drafts)
            vectors.append(self.brought(name, count + drafts, count + right))
            rights[name] = count + right
            self.accepted, self.rejected = self.accepted + right, self.rejected + drafts - right
        outs = stepped(self.batch, steps, vectors, (), self.readers)
        assert all(bool(x.isfinite().all()) for x in outs)
        assert allowed or not self.told
        for name, right in rights.items():
            self.computed[name] += right
        return {name: x[:, : rights[name]] for name, x in zip(names, outs, strict=True)}

    def alone(self, name: str) -> Iterator[Tensor]:
        """What each token of a request sees without drafts, in a cache that it has for itself."""
        given = self.policy, self.tokens[name], PROMPTS[name], self.readers, self.backend
        for found in seen_alone(*given):
            yield from found.unbind(1)


@dataclass(frozen=True)
class Worthy(Evictor):
    """Keep the tokens of the largest worth, which is known when a token arrives."""

    name: ClassVar[str] = "worthy"
    reads = frozenset({"keys"})
    scores_once = True
    decode = "grow"
    replan = Replan(short=True)

    def score(self, view: LayerView) -> Tensor:
        """Return a token's worth, by its key."""
        assert view.keys is not None
        return view.keys[..., 0]


TURNS = ("a", "ab", "abc", "bca", "cab", "ab", "abc", "ca", "cba", "abc", "b", "acb")


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "readers"), [*((name, 0) for name in POLICIES), ("window", 2)])
def test_drafts_attend_as_decoded_tokens_and_wrong_ones_leave_no_trace(
    name: str, readers: int, backend: str
) -> None:
    engine = Engine(POLICIES[name], backend, readers)
    alone = {name: engine.alone(name) for name in PROMPTS}
    for names in TURNS:
        for each, found in engine.step(*names).items():
            wanted = torch.stack([next(alone[each]) for _ in range(found.shape[1])], 1)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        held = engine.batch.held(kept=True)
        assert engine.pool.used == sum(each.pages for each in held.values())
    assert engine.accepted > 5
    assert engine.rejected > 5
    engine.batch.begin({}, tuple(PROMPTS))
    assert (engine.pool.used, engine.batch.pending) == (0, {})


def test_what_is_compressed_are_the_tokens_that_are_right() -> None:
    """Scores that a token gets once are those that it would have got when it was decoded."""
    policy = compose(Worthy(Budget(9)), parse("k4v2:window=3"))
    drafted, plain = Engine(policy), Engine(policy)
    for _ in range(8):
        drafted.step("a", "b")
    assert drafted.batch.pending
    drafted.batch.confirm(drafted.computed)
    assert not drafted.batch.pending
    while plain.computed != drafted.computed:
        plain.step(*(n for n in "ab" if plain.computed[n] < drafted.computed[n]), most=0)
    for engine in (drafted, plain):
        assert engine.batch.decoding is not None
        assert len(engine.batch.decoding.compress()) == 2
    assert drafted.batch.held(kept=True) == plain.batch.held(kept=True)
    for name, found in drafted.step("a", "b", most=0).items():
        torch.testing.assert_close(found, plain.step(name, most=0)[name], rtol=1e-4, atol=1e-5)


def test_what_pads_a_prompt_is_not_stored() -> None:
    engine = Engine(POLICIES["selector"])
    alone = engine.alone("b")
    found = engine.step("b", padded=True)["b"]
    wanted = torch.stack([next(alone) for _ in range(found.shape[1])], 1)
    torch.testing.assert_close(found, wanted)
    assert engine.batch.held(kept=True)["b"].computed == PROMPTS["b"]
    assert not engine.batch.pending
    torch.testing.assert_close(engine.step("b", most=0)["b"][:, 0], next(alone))


def test_a_request_that_ends_or_restarts_drops_its_drafts() -> None:
    engine = Engine(POLICIES["window"])
    while not {"a", "b"} <= engine.batch.pending.keys():
        engine.step("a", "b", "c")
    engine.computed["a"] = 0  # it is preempted
    engine.batch.begin({}, ("a", "b"))
    assert engine.batch.pending.keys() <= {"c"}
    alone = engine.alone("a")
    for _ in range(6):
        for found in engine.step("a")["a"].unbind(1):
            torch.testing.assert_close(found, next(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("computed", [-1, 5])
def test_a_request_that_goes_on_from_elsewhere_fails(computed: int) -> None:
    engine = Engine(POLICIES["window"])
    while engine.batch.pending.keys() != {"a", "b"}:
        engine.step("a", "b")
    first = engine.batch.pending["a"].first
    engine.batch.confirm({"a": first + computed, "b": engine.computed["b"]})
    assert "but the cache holds" in str(engine.told["a"])
    assert engine.batch.names == ["b"]


def test_a_step_with_drafts_over_fixed_memory_is_an_error() -> None:
    engine = Engine(POLICIES["window"])
    engine.batch.fix(3, LONGEST)
    engine.step("b", most=0)
    engine.draw = random.Random(1)  # the first step has drafts
    with pytest.raises(RuntimeError, match="decode steps are captured in graphs"):
        engine.step("b")


def test_lack_of_pages_for_drafts_fails_the_requests_and_frees_all() -> None:
    engine = Engine(parse("k8v4"))
    engine.step("b", most=0)
    held = engine.pool.allocate(engine.pool.free)
    for _ in range(20):
        engine.step("b", allowed=True)
        if engine.told:
            break
    assert "pages" in str(engine.told["b"])
    engine.pool.release(held)
    assert engine.pool.used == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("snapkv:budget=12,window=4", None),
        ("k4v2:window=5", None),
        ("h2o:budget=12", "observes the attention of generated queries"),
        ("streaming:budget=9", "evicts or moves another"),
        ("quest:budget=25%+k4v2", "reads pages as their keys rank them"),
        ("kv-compress:rate=2,every=4", "observes the attention of generated queries"),
    ],
)
def test_policies_that_do_more_with_a_generated_token_say_so(text: str, why: str | None) -> None:
    policy, found = parse(text), unlike_drafts(parse(text))
    assert (found is None) == (why is None)
    if why is None:
        return
    assert why in str(found)
    cache = PolicyCache(policy, SHAPE, backend="torch")
    cache.begin(torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"cannot verify drafts, as .*; use a policy that plans"):
        cache.begin_drafts([torch.ones(1, 1, dtype=torch.bool)])


def test_plans_between_generated_tokens_are_no_plans_of_drafts() -> None:
    class Often(Worthy):
        replan = Replan(every=4)

    assert "plans again" in str(unlike_drafts(compose(Often(Budget(9)))))
