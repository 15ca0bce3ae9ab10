"""Decode steps on an engine's tensors, compared with attention and storing in torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import Case
from kv_attention import Attended, RowGroup, RowInputs, RowMemo, TokenPlaces, load_rows
from kv_cpu.rows import declined, decode_rows
from kv_policy import (
    Observe,
    PagedTokens,
    PageLayout,
    RawCodec,
    Running,
    RunningMean,
    RunningSum,
    TokenFormat,
)

BEFORE, AFTER = 2, 1  # rows of other tokens around those that decode


def rows_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the new tokens by token and head, NaN in rows of others."""
    (fresh,) = case.dense
    by_token = (
        case.q.squeeze(3).flatten(1, 2),
        *(x.squeeze(2) for x in (fresh.key, fresh.value)),
    )
    padded = [torch.full((BEFORE + len(x) + AFTER, *x.shape[1:]), torch.nan) for x in by_token]
    for x, wide in zip(by_token, padded, strict=True):
        wide[BEFORE:-AFTER] = x
    q, key, value = padded
    return q, key, value


def inputs(case: Case, **more: Any) -> RowInputs:
    """Return the case as a step on an engine's tensors, whose output is NaN so far."""
    q, key, value = rows_of(case)
    out = torch.full((len(q), q.shape[1], value.shape[2]), torch.nan)
    given = RowInputs(q, key, value, out, BEFORE, case.position, case.pages, case.scale)
    return replace(given, softcap=case.softcap, sinks=case.sinks, **more)


def done(step: RowInputs) -> Attended:
    """Take the step, which must be supported."""
    found = decode_rows(step)
    assert found is not None
    return found


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    "tiers", [[], [("8", "4")], [("3", "4n")], [("bfloat16", "bfloat16"), ("4", "2")]]
)
def test_output_is_that_of_torch(
    near: float, case: Callable[..., Case], tiers: list, sinks: bool, softcap: float | None
) -> None:
    """Rows of the sequences are attention over stored tokens and their own; others stay."""
    made = case(3, L=1, H=3, G=2, D=33, Dv=17, tiers=tiers, sinks=sinks, softcap=softcap)
    step = inputs(made)
    found = done(step)
    torch.testing.assert_close(found.out, made.attend().out, rtol=near, atol=near)
    assert step.output[:BEFORE].isnan().all()
    assert step.output[-AFTER:].isnan().all()
    by_head = step.output[BEFORE:-AFTER].unflatten(1, (3, 2)).unsqueeze(3)
    assert torch.equal(by_head, found.out)


def grouped(
    parts: list[tuple[tuple[int, ...], Case]], heads: int, **more: Any
) -> tuple[RowInputs, Tensor]:
    """Return heads of several cases as one step, and its attention by that of each.

    Vectors are as long as the longest, and NaN past their own dimensions.
    """
    first = parts[0][1]
    group = first.q.shape[2]
    dims = [(each.q.shape[-1], each.dense[0].value.shape[-1]) for _, each in parts]
    wide = tuple(map(max, zip(*dims, strict=True)))
    rows = len(first.q)
    q, key, value = (
        torch.full((BEFORE + rows + AFTER, heads * n, dim), torch.nan)
        for n, dim in ((group, wide[0]), (1, wide[0]), (1, wide[1]))
    )
    wanted = torch.zeros(rows, heads, group, 1, wide[1])
    sinks = None if first.sinks is None else torch.zeros(heads, group)
    groups = []
    for (own, each), dim in zip(parts, dims, strict=True):
        for i, head in enumerate(own):
            at = slice(head * group, (head + 1) * group)
            q[BEFORE:-AFTER, at, : dim[0]] = each.q[:, i, :, 0]
            key[BEFORE:-AFTER, head, : dim[0]] = each.dense[0].key[:, i, 0]
            value[BEFORE:-AFTER, head, : dim[1]] = each.dense[0].value[:, i, 0]
            if sinks is not None:
                sinks[head] = each.sinks[i]
        dense = [replace(new, position=first.position) for new in each.dense]
        out = replace(each, position=first.position, dense=dense).attend().out
        wanted[:, list(own), ..., : dim[1]] = out
        groups.append(RowGroup(own, dim, tuple(each.pages)))
    out = torch.full((len(q), heads * group, wide[1]), torch.nan)
    given = RowInputs(q, key, value, out, BEFORE, first.position, (), first.scale)
    return replace(given, softcap=first.softcap, sinks=sinks, groups=groups, **more), wanted


TIERS = {
    "codes": [("8", "4")],
    "bits": [("3", "4n"), ("4", "2")],
    "plain": [("bfloat16", "float16")],
    "nothing": [],
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("length", [5, 700])
@pytest.mark.parametrize("tiers", TIERS)
def test_heads_have_dimensions_and_tokens_of_their_own(
    near: float,
    case: Callable[..., Case],
    tiers: str,
    length: int,
    sinks: bool,
    softcap: float | None,
) -> None:
    """A head attends in the dimensions of its group, and the rest of its output is 0."""
    some = {"L": 1, "G": 2, "B": 2, "sinks": sinks, "softcap": softcap, "stored": length}
    parts = [
        ((2, 0), case(1, H=2, D=33, Dv=17, tiers=TIERS[tiers], **some)),
        ((1,), case(2, H=1, D=7, Dv=24, tiers=[("8", "8")], **some)),
        ((3,), case(3, H=1, D=1, Dv=1, tiers=[], **some)),
    ]
    step, wanted = grouped(parts, 4)
    copies = torch.empty(2, 4, 33), torch.empty(2, 4, 24)
    found = done(replace(step, copies=copies))
    torch.testing.assert_close(found.out, wanted, rtol=near, atol=near)
    for copy, given in zip(copies, (step.key, step.value), strict=True):
        torch.testing.assert_close(copy, given[BEFORE:-AFTER], equal_nan=True)
    assert step.output[:BEFORE].isnan().all()
    assert step.output[-AFTER:].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, two: (one,), "head 1 is in no group; groups have all heads"),
        (lambda one, two: (one, one, two), "head 0 is named twice"),
        (lambda one, two: (replace(one, heads=(2,)), two), "a head of group 0 is 2; it must be"),
        (lambda one, two: (replace(one, heads=()), two), "group of heads 0 is truncated"),
        (
            lambda one, two: (replace(one, dims=(5, 6)), two),
            "dimensions; those of its heads have 5",
        ),
        (lambda one, two: (replace(one, dims=(7, 6)), two), "dimensions of keys of group 0 is 7"),
        (lambda one, two: (replace(one, pages=two.pages), two), "part 0 has keys and values of 4"),
        (
            lambda one, two: (replace(one, heads=(0, 1)),),
            r"table of part 0 is .*; it must be .*\[2, 2, ",
        ),
    ],
)
def test_groups_that_do_not_match_are_refused(
    case: Callable[..., Case], change: Callable[..., tuple], message: str
) -> None:
    """The sentence names what is wrong, and the output has not changed."""
    parts = [((i,), case(i, B=2, L=1, H=1, D=6 - 2 * i, Dv=6)) for i in range(2)]
    step, _ = grouped(parts, 2)
    with pytest.raises(RuntimeError, match=message):
        decode_rows(replace(step, groups=change(*step.groups)))
    assert step.output.isnan().all()


def test_groups_are_neither_observed_nor_stored(case: Callable[..., Case]) -> None:
    """Others do that."""
    step, _ = grouped([((0,), case(0, B=2, L=1, H=1, D=6, Dv=6))], 1)
    reason = "heads of different dimensions are observed, or their new tokens stored"
    assert declined(step) is None
    assert declined(replace(step, observations=(Observe(1),))) == reason
    assert declined(replace(step, places=places(2, 1, (6, 6)))) == reason


def test_padding_has_no_output(near: float, case: Callable[..., Case]) -> None:
    """A sequence whose new token is padding gets zeros, though its vectors are NaN."""
    made = case(1, L=1, padding="all")
    step = inputs(made)
    assert (done(step).out[-1] == 0).all()
    expected = made.attend().out[0, ..., 0, :].flatten(0, 1)
    torch.testing.assert_close(step.output[BEFORE], expected, rtol=near, atol=near)


def test_observations_are_those_of_torch(near: float, case: Callable[..., Case]) -> None:
    """Masses of stored tokens, and of the new one, for several observations."""
    made = case(5, L=1, tiers=[("8", "8"), ("4", "4")], known=True)
    watched = Observe(1, "max"), Observe(1, also=frozenset({"squares"}))
    found = done(inputs(made, observations=watched))
    other = made.attend(watched[0], "torch", watched[1:])
    for mine, theirs in (
        *zip(found.mass, other.mass, strict=True),
        *zip(found.seen, other.seen, strict=True),
        *zip(found.others[0].also, other.others[0].also, strict=True),
    ):
        if isinstance(mine, dict):
            mine, theirs = mine["squares"], theirs["squares"]
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("observed", [(), (Observe(None, "mean"),)])
def test_layers_that_share_a_memo_are_as_those_alone(
    case: Callable[..., Case], observed: tuple[Observe, ...]
) -> None:
    """What the first layer found out holds for the others, which are checked for the rest."""
    layers = [case(seed, L=1, H=2, G=2, tiers=TIERS["bits"], ragged=False) for seed in range(3)]
    memo, more = RowMemo(), {"observations": observed} if observed else {}
    with torch.no_grad():
        for layer in layers:
            found, alone = (done(inputs(layer, memo=each, **more)) for each in (memo, None))
            assert memo.found is not None
            for got, wanted in (((found.out,), (alone.out,)), (found.mass, alone.mass)):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        step = inputs(layers[0], memo=memo, **more)
        wide = torch.stack((step.query, step.query), -1)[..., 0]
        assert decode_rows(replace(step, query=wide)) is None
    unused = RowMemo()
    done(inputs(layers[0], memo=unused))  # gradients might be required of the next layer
    assert unused.found is None


def places(tokens: int, heads: int, dims: tuple[int, int]) -> TokenPlaces:
    """Return places of float32 tokens, each in a page of its own, all others 255."""
    form = TokenFormat(*(RawCodec(dim, torch.float32) for dim in dims))
    layout = PageLayout.sized(form, 4, False, False)
    data = torch.full((tokens * heads + 3, layout.nbytes), 255, dtype=torch.uint8)
    page = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[: tokens * heads]
    return TokenPlaces(data, layout, page, torch.arange(tokens * heads) % 4)


def test_new_tokens_are_stored_and_copied(near: float, case: Callable[..., Case]) -> None:
    """Tokens lie in their slots afterwards, no other byte has changed, and copies are equal."""
    made = case(2, L=1, H=2, D=6, Dv=3)
    step = inputs(made)
    tokens = len(step.key) - AFTER
    where = places(tokens, 2, (6, 3))
    copies = torch.empty(2, 2, 6), torch.empty(2, 2, 3)
    done(replace(step, places=where, copies=copies))
    (key_at, _, key_bytes), (value_at, _, value_bytes) = where.layout.segments
    untouched = torch.ones_like(where.data, dtype=torch.bool)
    for i, (page, slot) in enumerate(zip(where.page.tolist(), where.slot.tolist(), strict=True)):
        row, head = divmod(i, 2)
        for at, size, given in ((key_at, key_bytes, step.key), (value_at, value_bytes, step.value)):
            span = slice(at + slot * size, at + (slot + 1) * size)
            stored = where.data[page, span].clone().view(torch.float32)
            torch.testing.assert_close(stored, given[row, head], equal_nan=True, rtol=0, atol=0)
            untouched[page, span] = False
    assert (where.data[untouched] == 255).all()
    for copy, given in zip(copies, (step.key, step.value), strict=True):
        assert torch.equal(copy, given[BEFORE:-AFTER])


def test_rows_of_one_request_see_tokens_as_stored(near: float, case: Callable[..., Case]) -> None:
    """The second row's stored tokens are the first row's new token, which the same call stores."""
    made = case(2, B=2, L=1, H=1, D=6, Dv=6, tiers=[])
    step = inputs(made)
    first = places(2, 1, (6, 6))
    table = first.page[:1].int().expand(2, 1, 1)
    where = replace(first, page=first.page[:1].repeat(4), slot=torch.tensor([2, 3, 0, 1]))
    length = torch.tensor([[0], [1]], dtype=torch.int32)
    seen = PagedTokens(where.data, table, length, where.layout)
    done(replace(step, pages=(seen,), places=where))
    both = step.key[BEFORE:-AFTER, 0].float(), step.value[BEFORE:-AFTER, 0].float()
    weights = (step.query[BEFORE + 1] @ both[0].T * step.scale).softmax(-1)
    torch.testing.assert_close(step.output[BEFORE + 1], weights @ both[1], rtol=near, atol=near)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda step, where: {"first": 4}, "rows 4 to 5 decode; there are 5"),
        (lambda step, where: {"first": -1}, "the first row"),
        (lambda step, where: {"output": step.query}, "share memory|memory"),
        (lambda step, where: {"output": step.output[:1].expand_as(step.output)}, "overlap"),
        (lambda step, where: {"places": replace(where, page=where.page + 99)}, "page"),
        (lambda step, where: {"places": replace(where, slot=where.slot + 4)}, "slot"),
        (lambda step, where: {"places": replace(where, page=where.page[:-1])}, "slots"),
    ],
)
def test_what_does_not_match_is_refused(
    near: float, case: Callable[..., Case], change: Callable[..., dict], message: str
) -> None:
    """The sentence names the argument, and neither the output nor a page has changed."""
    step = inputs(case(2, L=1, H=2, D=6, Dv=6))
    where = places(4, 2, (6, 6))
    with pytest.raises(RuntimeError, match=message):
        decode_rows(replace(step, **{"places": where, **change(step, where)}))
    assert step.output.isnan().all()
    assert (where.data == 255).all()


def scored(rows: int, tokens: int) -> PagedTokens:
    """Return rows of tokens in pages with scores and positions, a page each."""
    form = TokenFormat(RawCodec(6, torch.float32), RawCodec(6, torch.float32))
    layout = PageLayout.sized(form, tokens, True, True)
    data = torch.zeros(rows, layout.nbytes, dtype=torch.uint8)
    table = torch.arange(rows, dtype=torch.int32).view(-1, 1, 1)
    return PagedTokens(data, table, torch.full((rows, 1), tokens), layout)


@pytest.mark.parametrize("running", [RunningMean(), RunningMean(3), RunningSum(2)])
def test_scores_go_on_as_the_selector_says(
    near: float, case: Callable[..., Case], running: Running
) -> None:
    """Scores in pages are those that `update` returns, and the result has the new tokens alone."""
    made = case(2, B=2, L=1, H=1, D=6, Dv=6, tiers=[])
    pages, tokens = scored(2, 4), 4
    score = torch.rand(2, tokens)
    place = torch.tensor([[0, 2, 1, -1], [5, 3, 0, 1]], dtype=torch.int32)
    for at, x in ((pages.layout.score_offset, score), (pages.layout.position_offset, place)):
        pages.data[:, at : at + 4 * tokens] = x.view(torch.uint8)
    watch = Observe(1, "mean")
    step = inputs(made, observations=(watch,), running=running)
    step = replace(step, pages=(pages,), position=torch.tensor([[6], [-1]]))
    found = done(step)
    assert found.rescored
    assert len(found.mass) == 1
    plain = done(replace(step, running=None))
    at = pages.layout.score_offset
    mine = pages.data[:, at : at + 4 * tokens].clone().view(torch.float32)
    wanted = running.update(
        score, place.long(), step.position, plain.mass[0][:, 0], plain.seen[0][:, 0]
    )
    seen = place[0] >= 0
    torch.testing.assert_close(mine[0, seen], wanted[0, seen], rtol=near, atol=near)
    assert torch.equal(mine[0, ~seen], score[0, ~seen])
    assert torch.equal(mine[1], score[1])


@pytest.mark.parametrize("others", [0, 5000])  # further pages of the pool
def test_a_page_whose_scores_two_rows_would_update_is_refused(
    case: Callable[..., Case], others: int
) -> None:
    """Nothing has changed."""
    made = case(2, B=2, L=1, H=1, D=6, Dv=6, tiers=[])
    pages = scored(2, 4)
    more = torch.cat((pages.data, pages.data.new_zeros(others, pages.data.shape[1])))
    pages = replace(pages, data=more, table=torch.zeros_like(pages.table))
    step = inputs(made, observations=(Observe(1),), running=RunningMean())
    with pytest.raises(RuntimeError, match="page 0 is in two table rows"):
        decode_rows(replace(step, pages=(pages,)))
    assert step.output.isnan().all()
    assert not pages.data.any()


def test_what_is_not_supported_is_left_to_others(case: Callable[..., Case]) -> None:
    """Nothing is done, and the reason is given."""
    step = inputs(case(2, L=1))
    wide = replace(step, query=step.query.double())
    assert declined(wide) == "vectors in float64"
    assert decode_rows(wide) is None
    strided = replace(step, key=step.key.mT.contiguous().mT)
    assert declined(strided) == "vectors whose numbers are not consecutive"
    later = replace(step, observations=(Observe(1, skip=2),))
    assert declined(later) == "an observation needs positions or noise"
    without = replace(step, running=RunningMean(), observations=(Observe(1),))
    assert declined(without) == "pages without scores"
    several = replace(without, observations=(Observe(1), Observe(1)))
    assert declined(several) == "scores are updated with one sum of attention mass"


def test_backends_name_their_decode_step() -> None:
    """Native code has one, torch has none."""
    assert load_rows("cpu") is decode_rows
    assert load_rows("torch") is None
