import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evict_cases import LENGTHS, attended, planned, quick, shape
from kv_evict import ChunkKV, SnapKV
from kv_evict.chunkkv import means
from kv_policy import DROP, Budget, LayerView, Observe, parse
from kv_policy.testing import check_policy

WINDOWS = st.integers(1, 9)
CHUNKS = st.sampled_from([1, 2, 3, 4, 7, 20, 99])
MORE = st.tuples(st.integers(0, 24), st.integers(0, 12))  # per sequence (two), beside the window


def alike(seed: int, window: int) -> LayerView:
    """Heads of a sequence that hold the same tokens, with different attention."""
    view = attended(seed, window)

    def first(x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, 3, -1)

    assert view.mass is not None
    assert view.seen is not None
    draw = torch.Generator().manual_seed(seed)
    seen = first(view.seen)
    return replace(
        view,
        position=first(view.position),
        fresh=first(view.fresh),
        score=torch.rand(seen.shape, generator=draw).masked_fill(first(view.fresh), 0),
        mass=torch.rand(seen.shape, generator=draw, dtype=torch.float64).pow(4) * seen,
        seen=seen,
    )


def scores_of_chunks(policy: ChunkKV, view: LayerView, b: int) -> dict[int, float]:
    """Return the chunks of a sequence with the mean SnapKV score of their tokens, one by one."""
    by_token = SnapKV(
        window=policy.window, pool=policy.pool, pooling=policy.pooling, group=policy.group
    ).score(view)
    found: dict[int, list[float]] = {}
    for h in range(view.position.shape[1]):
        for i, at in enumerate(view.position[b, h].tolist()):
            if 0 <= at < view.length[b].item() - policy.window:
                found.setdefault(at // policy.chunk, []).append(by_token[b, h, i].item())
    return {number: math.fsum(each) / len(each) for number, each in found.items()}


def by_hand(policy: ChunkKV, view: LayerView, budgets: Sequence[int]) -> list[list[list[int]]]:
    """Return the tokens that each head keeps: its newest, then chunks until the budget is met."""
    result: list[list[list[int]]] = []
    for b, budget in enumerate(budgets):
        chunks = scores_of_chunks(policy, view, b)
        result.append([])
        for h in range(view.position.shape[1]):
            held = [at for at in view.position[b, h].tolist() if at >= 0]
            kept = [at for at in held if at >= view.length[b].item() - policy.window]
            for number in sorted(chunks, key=lambda each: -chunks[each]):
                for at in held:
                    if at // policy.chunk == number and at not in kept and len(kept) < budget:
                        kept.append(at)
            result[-1].append(sorted(kept))
    return result


def keeps(policy: ChunkKV, view: LayerView, budgets: Sequence[int]) -> list[list[list[int]]]:
    """Return the tokens that each head keeps by the policy's own plan."""
    plan = planned(policy, view, budgets)
    heads = range(view.position.shape[1])
    return [
        [view.position[b, h][plan[b, h] != DROP].tolist() for h in heads] for b in range(len(plan))
    ]


@given(
    seed=st.integers(0, 999),
    window=WINDOWS,
    chunk=CHUNKS,
    pool=st.sampled_from([1, 5]),
    pooling=st.sampled_from(["avg", "max"]),
)
@quick
def test_a_score_is_the_mean_of_snapkvs_over_the_chunks_tokens_in_all_heads(
    seed: int, window: int, chunk: int, pool: int, pooling: str
) -> None:
    policy = ChunkKV(window=window, chunk=chunk, pool=pool, pooling=pooling)
    view = attended(seed, window)
    found = policy.score(view)
    for b, length in enumerate(LENGTHS):
        chunks = scores_of_chunks(policy, view, b)
        for h in range(3):
            for i, at in enumerate(view.position[b, h].tolist()):
                if at >= length - window:
                    assert found[b, h, i].item() == math.inf
                elif at >= 0:
                    assert found[b, h, i].item() == pytest.approx(chunks[at // chunk], rel=1e-6)


@given(seed=st.integers(0, 999), window=WINDOWS, chunk=CHUNKS, more=MORE, same=st.booleans())
@quick
def test_heads_keep_the_best_chunks_one_by_one(
    seed: int, window: int, chunk: int, more: tuple[int, int], same: bool
) -> None:
    policy = ChunkKV(window=window, chunk=chunk, pool=3)
    view = (alike if same else attended)(seed, window)
    budgets = [window + each for each in more]
    assert keeps(policy, view, budgets) == by_hand(policy, view, budgets)


@given(seed=st.integers(0, 999), window=WINDOWS, chunk=CHUNKS, more=MORE)
@quick
def test_all_heads_keep_the_same_whole_chunks_and_the_beginning_of_one(
    seed: int, window: int, chunk: int, more: tuple[int, int]
) -> None:
    policy, view = ChunkKV(window=window, chunk=chunk, pool=3), alike(seed, window)
    budgets = [window + each for each in more]
    for b, heads in enumerate(keeps(policy, view, budgets)):
        held = [at for at in view.position[b, 0].tolist() if at >= 0]
        kept, oldest = heads[0], LENGTHS[b] - window
        assert heads == [kept] * 3
        newest = [at for at in held if at >= oldest]
        assert kept[-len(newest) :] == newest
        # A window with gaps from earlier passes is filled with older tokens.
        assert len(kept) == min(len(held), budgets[b])
        parts = []
        for number in {at // chunk for at in held if at < oldest}:
            whole = [at for at in held if at // chunk == number and at < oldest]
            stay = [at for at in whole if at in kept]
            assert stay == whole[: len(stay)]
            parts += [stay] if 0 < len(stay) < len(whole) else []
        assert len(parts) <= 1


@given(seed=st.integers(0, 999), heads=st.integers(1, 3), size=CHUNKS, places=st.integers(0, 40))
@quick
def test_means_are_over_chunks_of_positions_in_any_order(
    seed: int, heads: int, size: int, places: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    position = torch.rand(2, heads, 60, generator=draw).argsort(-1)[..., :places]
    counts = torch.rand(position.shape, generator=draw) < 0.7
    score = torch.rand(position.shape, generator=draw, dtype=torch.float64)
    found = means(score.masked_fill(~counts, math.nan), position, counts, size)
    for b in range(2):
        chunks: dict[int, list[float]] = {}
        for h, i in counts[b].nonzero().tolist():
            chunks.setdefault(position[b, h, i].item() // size, []).append(score[b, h, i].item())
        for h, i in counts[b].nonzero().tolist():
            each = chunks[position[b, h, i].item() // size]
            assert found[b, h, i].item() == pytest.approx(math.fsum(each) / len(each), rel=1e-12)


def test_chunks_are_told_by_position_and_not_by_place() -> None:
    position = torch.tensor([[[0, 3, 7, 8, 10, 11, 12, 13]]])
    score = torch.tensor([[[1.0, 5, 2, 3, 6, 9, 7, 8]]])
    found = means(score, position, position < 12, 4)
    assert found[0, 0, :6].tolist() == [3, 3, 2, 6, 6, 6]


def test_the_chunk_that_reaches_into_the_window_ends_before_it() -> None:
    policy = ChunkKV(window=3, chunk=4, pool=1)
    position = torch.arange(9).expand(1, 2, 9)
    mass = torch.tensor([[[1.0, 1, 1, 1, 6, 3, 9, 9, 9], [0, 0, 0, 3, 9, 6, 9, 9, 9]]])
    view = LayerView(
        layer=torch.tensor([0]),
        shape=shape(heads=2),
        position=position,
        fresh=torch.ones_like(position, dtype=torch.bool),
        score=torch.zeros(1, 2, 9),
        length=torch.tensor([9]),
        mass=mass,
        seen=(9 - position).clamp(max=3),
    )
    expected = [7 / 8 / 3] * 4 + [24 / 4 / 3] * 2 + [math.inf] * 3
    for head in policy.score(view)[0].tolist():
        assert head == pytest.approx(expected)
    # Five tokens: the window, and the whole better chunk. Six: one of the other chunk, too.
    assert keeps(policy, view, [5]) == [[[4, 5, 6, 7, 8]] * 2]
    assert keeps(policy, view, [6]) == [[[0, 4, 5, 6, 7, 8]] * 2]
    # Four: the chunk does not fit, and its first token is kept.
    assert keeps(policy, view, [4]) == [[[4, 6, 7, 8]] * 2]


@pytest.mark.parametrize("group", ["mean", "sum", "max"])
def test_a_prompts_chunks_are_judged_by_the_attention_of_its_last_queries(group: str) -> None:
    heads, asking, tokens = 3, 5, 47
    logits = torch.randn(heads, 2, asking, tokens, dtype=torch.float64) * 3
    ahead = torch.arange(tokens) > torch.arange(tokens - asking, tokens)[:, None]
    attention = logits.masked_fill(ahead, -torch.inf).softmax(-1)
    by_head = {"mean": attention.mean(1), "sum": attention.sum(1), "max": attention.amax(1)}[group]
    position = torch.arange(tokens).expand(1, heads, tokens)
    view = LayerView(
        layer=torch.tensor([0]),
        shape=shape(),
        position=position,
        fresh=torch.ones_like(position, dtype=torch.bool),
        score=torch.zeros(position.shape, dtype=torch.float64),
        length=torch.tensor([tokens]),
        mass=by_head.sum(1)[None],
        seen=(~ahead).sum(0).expand(position.shape),
    )
    policy = ChunkKV(window=asking, pool=1, chunk=7, group=group)
    before = by_head[..., : tokens - asking]  # 42 tokens: six chunks
    chunks = before.mean((0, 1)).view(6, 7).mean(1)
    found = policy.score(view)[0, 0, : tokens - asking].view(6, 7)
    torch.testing.assert_close(found, chunks[:, None].expand(6, 7))


@given(seed=st.integers(0, 999), chunk=CHUNKS)
@quick
def test_places_without_a_token_give_nothing(seed: int, chunk: int) -> None:
    policy, view = ChunkKV(window=4, chunk=chunk, pool=3), attended(seed, 4)
    assert view.mass is not None
    there = view.position >= 0
    rubbish = torch.rand(view.position.shape, dtype=torch.float64) * 1e9
    other = replace(
        view,
        mass=view.mass.where(there, rubbish),
        score=view.score.where(there, rubbish.float()),
    )
    assert torch.equal(policy.score(other)[there], policy.score(view)[there])
    padded = replace(
        view,
        **{
            name: torch.nn.functional.pad(getattr(view, name), (0, 5), value=value)
            for name, value in {
                "position": -1,
                "fresh": False,
                "score": 0,
                "mass": 0,
                "seen": 0,
            }.items()
        },
    )
    assert torch.equal(policy.score(padded)[..., :-5][there], policy.score(view)[there])


@given(st.integers(0, 999), WINDOWS)
@quick
def test_chunks_of_one_are_snapkvs_scores_on_average_over_heads(seed: int, window: int) -> None:
    view = alike(seed, window)
    plain = SnapKV(window=window, pool=3).score(view).mean(1, keepdim=True)
    there = view.position >= 0
    found = ChunkKV(window=window, pool=3, chunk=1).score(view)
    torch.testing.assert_close(found[there], plain.expand_as(found)[there])


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 20])
def test_a_prompt_shorter_than_window_or_budget_is_kept_whole(tokens: int) -> None:
    position = torch.arange(tokens).expand(1, 3, tokens)
    view = LayerView(
        layer=torch.tensor([0]),
        shape=shape(),
        position=position,
        fresh=torch.ones_like(position, dtype=torch.bool),
        score=torch.zeros(position.shape),
        length=torch.tensor([tokens]),
        mass=torch.rand(position.shape),
        seen=(tokens - position).clamp(max=8),
    )
    policy = ChunkKV(Budget(20), window=8, chunk=3)
    assert keeps(policy, view, [20]) == [[list(range(tokens))] * 3]


def test_an_arriving_token_that_nothing_was_observed_for_is_protected() -> None:
    view = LayerView(
        layer=torch.tensor([0]),
        shape=shape(heads=1),
        position=torch.tensor([[[41]]]),
        fresh=torch.tensor([[[True]]]),
        score=torch.zeros(1, 1, 1),
        length=torch.tensor([42]),
        generated=True,
    )
    assert ChunkKV().score(view).tolist() == [[[math.inf]]]


def test_scores_keep_the_dtype_of_the_view() -> None:
    view = attended(0, 4)
    for dtype in (torch.float32, torch.float64):
        assert ChunkKV(window=4).score(replace(view, score=view.score.to(dtype))).dtype == dtype


@pytest.mark.parametrize(
    "policy",
    [
        ChunkKV(),
        ChunkKV(pooling="max", group="max", chunk=3),
        ChunkKV(Budget(8), window=8, pool=1, group="sum", chunk=1),
        ChunkKV(Budget(30, "percent"), window=5, chunk=1000),
    ],
    ids=str,
)
def test_the_contract_holds(policy: ChunkKV) -> None:
    check_policy(policy)


def test_what_it_says_of_itself() -> None:
    policy = ChunkKV(Budget(64), window=16, group="max")
    assert policy.observe == Observe(last=16, group="max", power=1, skip=0, generated=False)
    assert (policy.protected, policy.decode, policy.scope, policy.tiers) == (16, "grow", "layer", 1)
    assert not policy.reads
    assert policy.capabilities.shortens
    assert not policy.capabilities.shares_prefixes
    assert not policy.capabilities.splits_heads
    assert "Liu et al." in policy.source


def test_text_form() -> None:
    assert parse("chunkkv") == ChunkKV()
    text = "chunkkv:budget=50%,window=16,pool=7,pooling=max,group=sum,chunk=11"
    policy = ChunkKV(Budget(50, "percent"), window=16, pool=7, pooling="max", group="sum", chunk=11)
    assert str(policy) == text
    assert parse(text) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget=16", "a budget of 16 tokens is smaller than the 32 it protects"),
        ("window=0", "chunkkv: window=0 is refused"),
        ("pool=4", "chunkkv: pool=4 has no middle; use an odd number, such as 5"),
        ("chunk=0", "chunkkv: chunk=0 is refused"),
        ("chunk=2.5", "chunkkv: chunk=2.5 is refused"),
        ("size=10", "chunkkv has no parameter 'size'; its parameters: budget, window"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(f"chunkkv:{text}")
