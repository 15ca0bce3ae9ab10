"""The replay of prompts that wait: its calls in order, bases, and what is refused."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from kv_attention import AttentionInputs, peak
from kv_policy import Budget, Evictor, LayerView, Replay, compose, parse
from kv_runtime import PolicyCache, ReplayChunk
from tiered_policies import SHAPE, Turned

TOKENS, ROOM = 24, 64


@dataclass(frozen=True)
class Repeats(Evictor):
    """Keeps what a replay attends to."""

    name: ClassVar[str] = "repeats"
    scope: ClassVar[Literal["layer", "model"]] = "layer"
    replay: ClassVar[Replay] = Replay("", "", tokens=16)

    def score(self, view: LayerView) -> Tensor:
        if view.replayed is None:
            return view.score
        assert not bool(view.replayed[~view.fresh].any())
        return view.score + view.replayed


POLICY = Repeats(Budget(ROOM))


def drawn(rows: int, tokens: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of each layer."""
    g = torch.Generator().manual_seed(seed)
    lead = (SHAPE.layers, rows, SHAPE.kv_heads)
    query = 2 * torch.randn(*lead, SHAPE.group, tokens, SHAPE.key_dim, generator=g)
    key = torch.randn(*lead, tokens, SHAPE.key_dim, generator=g)
    value = torch.randn(*lead, tokens, SHAPE.value_dim, generator=g)
    return list(zip(query, key, value, strict=True))


def made(policy: object = POLICY, **options: object) -> PolicyCache:
    return PolicyCache(policy, SHAPE, page_tokens=4, backend="torch", replays=True, **options)


def read(cache: PolicyCache, tokens: int, seed: int = 1) -> list[tuple[Tensor, Tensor, Tensor]]:
    given = drawn(1, tokens, seed)
    cache.begin(torch.ones(1, tokens, dtype=torch.bool))
    for layer, vectors in enumerate(given):
        cache.attend(layer, *vectors, 0.4)
    return given


def chunk(place: int, width: int, first: int, end: int) -> ReplayChunk:
    position = torch.arange(place, place + width)[None]
    return ReplayChunk(position, torch.tensor([first]), torch.tensor([end]))


def scores(cache: PolicyCache) -> Tensor:
    """Return the stored scores by layer and head, in order of positions; nothing was evicted."""
    (store,) = cache.batch.stores
    found = store.read(store.table_rows())
    order = found.position.masked_fill(~found.held, 9999).argsort(-1)
    score = found.score.gather(-1, order)[:, : int(found.held.sum(-1).max())]
    return score.unflatten(0, (SHAPE.layers, SHAPE.kv_heads))


def want(
    prompt: tuple[Tensor, Tensor, Tensor],
    again: tuple[Tensor, Tensor, Tensor],
    first: int,
    end: int,
) -> tuple[Tensor, Tensor]:
    """Return a replay's output, and the scores of the chunk, with plain matrices."""
    query, key, value = again
    held, width = prompt[1].shape[2], key.shape[2]
    keys, values = torch.cat([prompt[1], key], 2), torch.cat([prompt[2], value], 2)
    logits = query @ keys[:, :, None].mT * 0.4
    later = torch.arange(held + width) > held + torch.arange(width)[:, None]
    logits = logits.masked_fill(later, -torch.inf)
    out = logits.softmax(-1) @ values[:, :, None]
    near = logits.clone()
    near[..., :first], near[..., end:held] = -torch.inf, -torch.inf
    return out, near.softmax(-1)[0, ..., first:end].amax((1, 2))


def test_chunks_are_attended_to_and_scored() -> None:
    cache = made()
    prompt = read(cache, TOKENS)
    assert cache.waiting.position.shape == (1, TOKENS)
    found = []
    for seed, (first, end) in enumerate(((0, 16), (16, TOKENS))):
        reading = cache.reread(chunk(TOKENS, 9, first, end))
        again = drawn(1, 9, seed=seed + 5)
        for layer, vectors in enumerate(again):
            out, score = want(prompt[layer], vectors, first, end)
            torch.testing.assert_close(reading.attend(layer, *vectors, 0.4), out)
            found.append(score)
    cache.replayed()
    assert cache.waiting is None
    whole = torch.cat([torch.stack(found[:3]), torch.stack(found[3:])], -1)
    torch.testing.assert_close(scores(cache), whole)


def test_a_later_prompt_attends_to_stored_tokens_that_it_does_not_score() -> None:
    cache = made()
    first = read(cache, 10)
    cache.replayed()
    assert not bool(scores(cache).any())  # no chunk was read again
    second = read(cache, 8, seed=2)
    reading = cache.reread(chunk(18, 5, 10, 18))
    for layer, vectors in enumerate(drawn(1, 5, seed=3)):
        both = [torch.cat(pair, -2) for pair in zip(first[layer], second[layer], strict=True)]
        out, score = want(tuple(both), vectors, 10, 18)
        torch.testing.assert_close(reading.attend(layer, *vectors, 0.4), out)
        assert score.shape[-1] == 8
    cache.replayed()
    assert bool((scores(cache)[..., 10:] > 0).all())
    assert not bool(scores(cache)[..., :10].any())


@pytest.mark.parametrize(
    "basis", [Turned("6", "5"), Turned("4", "3"), Turned("7", "6", together=2)], ids=str
)
def test_a_basis_projects_what_is_read_again(basis: Turned) -> None:
    cache, plain = made(compose(POLICY, basis)), made()
    for each in (cache, plain):
        read(each, TOKENS)
        reading = each.reread(chunk(TOKENS, 9, 0, TOKENS))
        outs = [reading.attend(i, *v, 0.4) for i, v in enumerate(drawn(1, 9, seed=5))]
        assert outs[0].shape == (1, SHAPE.kv_heads, SHAPE.group, 9, SHAPE.value_dim)
        each.replayed()
    if basis.key_ranks == "6":  # of full rank: a rotation
        torch.testing.assert_close(scores(cache), scores(plain), rtol=1e-4, atol=1e-5)


def test_an_engine_that_does_not_replay_refuses() -> None:
    sentence = "which this engine does not do; use kv_serve.CompressedCache with a model of trans"
    for policy in (POLICY, compose(POLICY, parse("raw"))):
        with pytest.raises(ValueError, match=sentence):
            PolicyCache(policy, SHAPE)


def test_heads_of_different_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"its basis stores heads with \d different ranks"):
        made(compose(POLICY, Turned("6253", "154")))


def test_a_prompt_in_several_passes_is_refused() -> None:
    cache = made()
    with pytest.raises(ValueError, match="do not split it into passes with remaining=1"):
        cache.begin(torch.ones(1, 4, dtype=torch.bool), prompt=True, remaining=1)
    read(cache, 4)


def test_a_waiting_prompt_is_an_unfinished_pass() -> None:
    cache = made()
    for call in (cache.replayed, lambda: cache.reread(chunk(4, 2, 0, 4))):
        with pytest.raises(RuntimeError, match="no prompt waits for a replay"):
            call()
    read(cache, 4)
    with pytest.raises(RuntimeError, match="stopped in the replay of its prompt"):
        read(cache, 4)
    cache.reset()
    assert cache.waiting is None
    read(cache, 4)
    cache.replayed()
    given = drawn(1, 1, seed=9)
    cache.begin(torch.ones(1, 1, dtype=torch.bool))
    for layer, vectors in enumerate(given):
        cache.attend(layer, *vectors, 0.4)
    assert cache.waiting is None  # generated tokens are not read again
    assert (cache.memory().tokens == 5).all()


def test_the_replay_attends_by_the_backend_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def partial_of(name: str) -> object:
        def declines(inputs: AttentionInputs, scored: int) -> None:
            asked.append((name, scored))

        return declines

    monkeypatch.setattr(peak, "load_partial", partial_of)
    cache = PolicyCache(POLICY, SHAPE, page_tokens=4, backend="reference", replays=True)
    read(cache, TOKENS)
    cache.reread(chunk(TOKENS, 9, 0, 16)).attend(0, *drawn(1, 9, seed=5)[0], 0.4)
    assert asked == [("reference", 1), ("reference", 0)]  # the chunk, and the rest of the prompt


@pytest.mark.parametrize(("softcap", "sinks"), [(None, True), (1.2, False), (1.2, True)])
@pytest.mark.parametrize("basis", [None, Turned("7", "6", together=2)], ids=str)
def test_a_replay_counts_sinks_once_and_scores_with_them(softcap, sinks, basis) -> None:
    policy = POLICY if basis is None else compose(POLICY, basis)
    cache, g = made(policy), torch.Generator().manual_seed(9)
    drawn_sinks = 1.5 + torch.randn(SHAPE.layers, SHAPE.kv_heads, SHAPE.group, generator=g)
    by_layer = drawn_sinks if sinks else [None] * SHAPE.layers
    prompt = drawn(1, TOKENS, 1)
    cache.begin(torch.ones(1, TOKENS, dtype=torch.bool))
    for layer, vectors in enumerate(prompt):
        cache.attend(layer, *vectors, 0.4, softcap, by_layer[layer])
    found = []
    first, end = 8, TOKENS
    reading = cache.reread(chunk(TOKENS, 9, first, end))
    for layer, (query, key, value) in enumerate(drawn(1, 9, seed=5)):
        out = reading.attend(layer, query, key, value, 0.4, softcap, by_layer[layer])
        if basis is not None:
            assert bool(out.isfinite().all())
            continue
        keys, values = (
            torch.cat(two, 2) for two in zip(prompt[layer][1:], (key, value), strict=True)
        )
        x = query @ keys[:, :, None].mT * 0.4
        x = x if softcap is None else softcap * (x / softcap).tanh()
        x = x.masked_fill(torch.arange(TOKENS + 9) > TOKENS + torch.arange(9)[:, None], -torch.inf)
        near = x.clone()
        near[..., :first] = -torch.inf
        column = torch.full((*x.shape[:-1], 1), -torch.inf)
        if by_layer[layer] is not None:
            column = by_layer[layer][None, :, :, None, None].expand_as(column)
        whole, some = (torch.cat((y, column), -1).softmax(-1)[..., :-1] for y in (x, near))
        torch.testing.assert_close(out, whole @ values[:, :, None])
        found.append(some[0, ..., first:end].amax((1, 2)))
    cache.replayed()
    if basis is None:
        torch.testing.assert_close(scores(cache)[..., first:end], torch.stack(found))
