"""The laws of a selector."""

import copy
import dataclasses
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kv_policy.budget import Budget
from kv_policy.complete import CompleteSelector, complete
from kv_policy.contract import (
    DROP,
    NOBODY,
    Capabilities,
    LayerView,
    Merge,
    MergeView,
    Selector,
    Step,
    StepView,
)
from kv_policy.lifecycle import Observe, Replan, Replay
from kv_policy.shape import CacheShape
from kv_policy.sorted_selector import SortedSelector
from kv_policy.testing.launches import reading_raises
from kv_policy.testing.laws import equal, law, works
from kv_policy.testing.running import check_running
from kv_policy.testing.views import (
    DrawnTokens,
    after_last_queries,
    after_prompt,
    cut_step,
    decoding_step,
    layers_of,
    while_decoding,
)

_EVERY = slice(0, None)
_STACKED = (
    "of a view of several layers differs from that of each layer alone; the layer of a row is "
    "layer[row]"
)


def check_selector(of: Selector, able: Capabilities, shape: CacheShape) -> None:
    """Check a selector's members, scores, plans and steps."""
    selector = works("the selector's members cannot be read", complete, of)
    _check_answers(selector)
    for seed, stored in enumerate((0.0, 0.5, 0.9)):
        tokens = after_prompt(selector, shape, stored, seed)
        score = _check_scores(selector, able, tokens)
        rescored = _check_rescore(selector, able, tokens, score)
        _check_plan(selector, able, tokens, score, rescored)
        _check_merge(selector, able, tokens, score, seed)
    if selector.scores_last:
        _check_scored_last(selector, after_last_queries(selector, shape, seed=4))
    arriving = while_decoding(selector, shape, seed=3)
    check_running(selector, arriving)
    if selector.decode == "step" or selector.observe.generated:
        _check_arriving(selector, able, arriving)
    if selector.decode == "step":
        for seed in range(5):
            _check_step(selector, able, shape, seed)
    if selector.decodes_on_device:
        _check_on_device(selector, shape, arriving)


def _check_on_device(selector: CompleteSelector, shape: CacheShape, arriving: DrawnTokens) -> None:
    """Check that what a decode step calls reads nothing on the host."""
    reads = "reads numbers on the host, though decodes_on_device is True"
    generated = selector.observe.generated or selector.scores_once
    if generated or selector.decode == "step":
        view = arriving.layer(0) if "queries" in selector.reads else arriving.stacked()
        with reading_raises():
            works(f"score {reads}", selector.score, view)
    if selector.decode == "step":
        step = decoding_step(selector, shape, 0)
        with reading_raises():
            works(f"recent_tokens {reads}", selector.recent_tokens, step.budget)
            works(f"step {reads}", selector.step, step)


def _check_answers(selector: CompleteSelector) -> None:
    law(0 < selector.tiers < NOBODY, f"tiers is {selector.tiers}; it must be 1 to {NOBODY - 1}")
    law(
        selector.budget is None or isinstance(selector.budget, Budget),
        f"budget is {selector.budget!r}; it must be a Budget, or None for a rule of its own",
    )
    law(isinstance(selector.observe, Observe), "observe must be an Observe")
    law(selector.protected >= 0, f"protected is {selector.protected}; it must be 0 or more")
    law(isinstance(selector.replan, Replan), "replan must be a Replan")
    law(
        selector.replay is None or isinstance(selector.replay, Replay),
        f"replay is {selector.replay!r}; it must be a Replay, or None for no second reading",
    )
    law(selector.scope in ("layer", "model"), f"scope is {selector.scope!r}; use layer or model")
    law(selector.decode in ("grow", "step"), f"decode is {selector.decode!r}; use grow or step")
    law(
        selector.reads <= {"keys", "values", "queries"},
        f"reads is {set(selector.reads)}; it may hold keys, values and queries",
    )
    law(
        selector.budget is None
        or selector.budget.unit != "tokens"
        or selector.budget.amount >= selector.protected,
        f"the budget of {selector.budget} tokens is below the {selector.protected} protected",
    )


def _layer_score(selector: CompleteSelector, view: LayerView) -> Float[Tensor, "B H L"]:
    score = works(
        "score failed on a view with only what the selector observes and reads",
        selector.score,
        view,
    )
    law(
        score.shape == view.position.shape and score.is_floating_point(),
        f"score returns {score.dtype} of shape {tuple(score.shape)}; expected floats of shape "
        f"{tuple(view.position.shape)}",
    )
    law(not score[view.position >= 0].isnan().any(), "score is NaN for a token")
    score = score.float()
    return score if view.generated else _adjusted(selector, view, score)


def _adjusted(
    selector: CompleteSelector, view: LayerView, score: Float[Tensor, "B H L"]
) -> Float[Tensor, "B H L"]:
    if selector.adjust is None:
        return score
    view = dataclasses.replace(view, score=score, keys=None, values=None)
    found = works("adjust failed on a view without vectors", selector.adjust, view)
    return _numbers("adjust", view, found)


def _numbers(method: str, view: LayerView, found: Tensor) -> Float[Tensor, "B H L"]:
    law(
        found.shape == view.position.shape and found.is_floating_point(),
        f"{method} returns {found.dtype} of shape {tuple(found.shape)}; expected floats of shape "
        f"{tuple(view.position.shape)}",
    )
    law(not found[view.position >= 0].isnan().any(), f"{method} returns NaN for a token")
    return found.float()


def _rescored(
    selector: CompleteSelector, tokens: DrawnTokens, score: Float[Tensor, "N B H L"]
) -> Float[Tensor, "N B H L"]:
    if selector.rescore is None:
        return score
    layers = []
    for layer in range(tokens.shape.layers):
        view = tokens.held(layer, score)
        found = works(
            "rescore failed on a view without observations and queries", selector.rescore, view
        )
        layers.append(_numbers("rescore", view, found))
    return torch.stack(layers)


def _check_rescore(
    selector: CompleteSelector,
    able: Capabilities,
    tokens: DrawnTokens,
    score: Float[Tensor, "N B H L"],
) -> Float[Tensor, "N B H L"]:
    """Check the scores of a plan as those of `score`, and return them."""
    if selector.rescore is None:
        return score
    found = _rescored(selector, tokens, score)
    view = tokens.held(0, score)
    before = copy.deepcopy(view)
    selector.rescore(view)
    for field in dataclasses.fields(view):
        old, new = getattr(before, field.name), getattr(view, field.name)
        same = not isinstance(old, Tensor) or equal(old, new)
        law(same, f"rescore changed the view's {field.name}")
    there = tokens.position >= 0
    law(
        equal(found[there], _rescored(selector, tokens, score)[there]),
        "rescore differs on a second call",
    )
    law(
        bool((((found == torch.inf) & there).sum(-1) <= selector.protected).all()),
        f"rescore is infinite for more tokens of a head than the {selector.protected} protected",
    )
    for sequences, heads, sentence in _parts(tokens, able):
        part, pick = tokens.cut(sequences, heads)
        there = part.position >= 0
        alone = _rescored(selector, part, pick(score))
        close = torch.isclose(alone, pick(found), rtol=1e-4, atol=1e-6)
        law(bool(close[there].all()), f"scores of rescore {sentence}")
    return found


def _scores(selector: CompleteSelector, tokens: DrawnTokens) -> Float[Tensor, "N B H L"]:
    layers = range(tokens.shape.layers)
    return torch.stack([_layer_score(selector, tokens.layer(layer)) for layer in layers])


def _gauges(selector: CompleteSelector, tokens: DrawnTokens) -> Float[Tensor, "N B H"] | None:
    views = [tokens.layer(layer) for layer in range(tokens.shape.layers)]
    found = []
    for view in views:
        head_stats = works("head_stats failed", selector.head_stats, view)
        if head_stats is None:
            return None
        lead = view.position.shape[:-1]
        law(
            head_stats.shape == lead and head_stats.is_floating_point(),
            f"head_stats returns {head_stats.dtype} of shape {tuple(head_stats.shape)}; expected "
            f"floats of shape {tuple(lead)}",
        )
        found.append(head_stats)
    each = torch.stack(found).float()
    if "queries" not in selector.reads:
        stacked = works("head_stats failed", selector.head_stats, tokens.stacked())
        assert stacked is not None  # a layer has them
        close = torch.isclose(stacked.float().view_as(each), each, rtol=1e-4, atol=1e-6)
        law(bool(close.all()), f"head_stats {_STACKED}")
    return each


def _check_scores(
    selector: CompleteSelector, able: Capabilities, tokens: DrawnTokens
) -> Float[Tensor, "N B H L"]:
    before = dict(_held(copy.deepcopy(tokens)))
    score = _scores(selector, tokens)
    for name, held in _held(tokens):
        law(equal(before[name], held), f"score changed the view's {name}")
    there = tokens.position >= 0
    law(equal(score[there], _scores(selector, tokens)[there]), "score differs on a second call")
    law(
        bool((((score == torch.inf) & there).sum(-1) <= selector.protected).all()),
        f"score is infinite for more tokens of a head than the {selector.protected} protected",
    )
    for sequences, heads, sentence in _parts(tokens, able):
        part, pick = tokens.cut(sequences, heads)
        there = part.position >= 0
        close = torch.isclose(_scores(selector, part), pick(score), rtol=1e-4, atol=1e-6)
        law(bool(close[there].all()), f"scores {sentence}")
    if "queries" not in selector.reads:  # with them a host scores one layer at a time
        stacked = _layer_score(selector, tokens.stacked()).view_as(score)
        there = tokens.position >= 0
        law(
            bool(torch.isclose(stacked, score, rtol=1e-4, atol=1e-6)[there].all()),
            f"score {_STACKED}",
        )
    return score


def _held(tokens: DrawnTokens) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the views, by name."""
    for field in dataclasses.fields(tokens):
        held = getattr(tokens, field.name)
        if isinstance(held, Tensor):
            yield field.name, held
    yield from tokens.also.items()
    if tokens.queries is not None:
        yield "queries", tokens.queries.vectors
        yield "queries' position", tokens.queries.position


def _check_arriving(selector: CompleteSelector, able: Capabilities, tokens: DrawnTokens) -> None:
    score = _check_scores(selector, able, tokens)
    forever = (score == torch.inf) & (tokens.position >= selector.protected)
    law(
        selector.observe.generated or not forever.any(),
        "score is infinite for a token that arrives in decoding; without observing generated "
        "queries it is never scored again and stays protected",
    )
    if selector.scores_once:
        _check_scored_once(selector, tokens, score)


def _check_scored_once(
    selector: CompleteSelector, tokens: DrawnTokens, score: Float[Tensor, "N B H L"]
) -> None:
    later = dataclasses.replace(
        tokens, score=tokens.score + 1, length=tokens.length + 5, fresh=~tokens.fresh
    )
    there = tokens.position >= 0
    law(
        bool(torch.isclose(_scores(selector, later), score, rtol=1e-4, atol=1e-6)[there].all()),
        "score depends on more than a token's key, value and position, though scores_once is True",
    )


def _check_scored_last(selector: CompleteSelector, tokens: DrawnTokens) -> None:
    there = tokens.position >= 0
    want, none = _scores(selector, tokens), torch.zeros_like(tokens.score)
    stored = [none, tokens.score + 1]
    if want.isinf().any():  # tokens that are protected no more were infinite
        stored.append(none.masked_fill(there & ~tokens.fresh, torch.inf))
    for score in stored:
        found = _scores(selector, dataclasses.replace(tokens, score=score.masked_fill(~there, 0)))
        law(
            bool(torch.isclose(found, want, rtol=1e-4, atol=1e-6)[there].all()),
            f"score of a pass with the last {selector.observe.last} queries of a prompt depends on "
            "stored scores, though scores_last is True",
        )


def _parts(tokens: DrawnTokens, able: Capabilities) -> list[tuple[Tensor, slice, str]]:
    count, heads = len(tokens.length), tokens.shape.kv_heads
    parts = [(torch.arange(count).flip(0), _EVERY, "change when sequences are reordered")]
    alone = "of a sequence depend on the other sequences, or on its padding"
    parts += [(torch.tensor([b]), _EVERY, alone) for b in range(count)]
    if able.splits_heads and heads > 1:
        differ = "of a shard of the heads differ from the whole's, though splits_heads is True"
        half = heads // 2
        parts += [(torch.arange(count), s, differ) for s in (slice(0, half), slice(half, heads))]
    return parts


def _plans(
    selector: CompleteSelector, tokens: DrawnTokens, score: Float[Tensor, "N B H L"]
) -> UInt8[Tensor, "N B H L"]:
    layers = tokens.shape.layers
    step = layers if selector.scope == "model" else 1
    head_stats = _gauges(selector, tokens)
    parts = [slice(first, first + step) for first in range(0, layers, step)]
    stored = None if selector.rescore is None else score
    given = _rescored(selector, tokens, score)
    views = [tokens.plan(given, head_stats, part, stored) for part in parts]
    plans = []
    for view in views:
        plan = works("plan failed", selector.plan, view)
        law(
            plan.shape == view.score.shape and plan.dtype == torch.uint8,
            f"plan returns {plan.dtype} of shape {tuple(plan.shape)}; expected uint8 of shape "
            f"{tuple(view.score.shape)}",
        )
        plans.append(plan)
    return torch.cat(plans)


def _check_plan(
    selector: CompleteSelector,
    able: Capabilities,
    tokens: DrawnTokens,
    score: Float[Tensor, "N B H L"],
    rescored: Float[Tensor, "N B H L"],
) -> None:
    plan = _plans(selector, tokens, score)
    law(equal(plan, _plans(selector, tokens, score)), "plan differs on a second call")
    there = tokens.position >= 0
    kept = plan != DROP
    law(
        bool((plan[kept] < selector.tiers).all()),
        f"plan sends tokens to a tier other than 0 to {selector.tiers - 1} and DROP ({DROP})",
    )
    law(not (kept & ~there).any(), "plan keeps an empty slot (position -1)")
    stored = there & ~tokens.fresh
    law(
        bool((plan >= tokens.tier)[stored].all()),
        "plan moves a stored token to an earlier tier than its own",
    )
    law(
        bool(kept[there & (rescored == torch.inf)].all()),
        "plan drops a protected token, whose score is infinite",
    )
    if selector.budget is not None:
        _check_budget(selector, tokens, kept)
    law(
        able.shortens or not (there & ~kept).any(),
        "plan drops tokens, but the capabilities have shortens=False",
    )
    for sequences, heads, sentence in _parts(tokens, able):
        part, pick = tokens.cut(sequences, heads)
        law(equal(_plans(selector, part, pick(score)), pick(plan)), f"plans {sentence}")
    if selector.plans_chunks:
        _check_chunk(selector, tokens, score)


def _check_merge(
    selector: CompleteSelector,
    able: Capabilities,
    tokens: DrawnTokens,
    score: Float[Tensor, "N B H L"],
    seed: int,
) -> None:
    """Check the merges of what a plan drops: targets, weights, purity and independence."""
    if selector.merge is None:
        return
    kept = _plans(selector, tokens, score) != DROP
    for layer in range(tokens.shape.layers):
        view = tokens.merge(layer, score, kept, seed)
        before = copy.deepcopy(view)
        answer = _merged(selector, view)
        for field in dataclasses.fields(view):
            old, new = getattr(before, field.name), getattr(view, field.name)
            same = not isinstance(old, Tensor) or equal(old, new)
            law(same, f"merge changed the view's {field.name}")
        again = _merged(selector, view)
        for field in dataclasses.fields(answer):
            one, other = getattr(answer, field.name), getattr(again, field.name)
            same = equal(one, other) if isinstance(one, Tensor) else one == other
            law(same, f"merge gives another {field.name} on a second call")
        whole = _weights(view, answer)
        for sequences, heads, sentence in _parts(tokens, able):
            part, pick = tokens.cut(sequences, heads)
            mine = part.merge(layer, pick(score), pick(kept), seed)
            most = mine.position.shape[-1]
            cut = whole[sequences][:, heads, :most, :most]
            close = torch.isclose(_weights(mine, _merged(selector, mine)), cut, atol=1e-5)
            law(bool(close.all()), f"merges {sentence}")


def _merged(selector: CompleteSelector, view: MergeView) -> Merge:
    assert selector.merge is not None
    answer = works("merge failed", selector.merge, view)
    law(isinstance(answer, Merge), f"merge returns {answer!r}; it must return a Merge")
    shape = tuple(view.position.shape)
    law(
        answer.target.shape == answer.weight.shape and answer.target.shape[:-1] == shape,
        f"merge returns targets and weights of {tuple(answer.target.shape)} and "
        f"{tuple(answer.weight.shape)}; both must be of {shape} and the targets of a token",
    )
    used = (answer.weight != 0) & view.dropped[..., None]
    inside = (answer.target >= 0) & (answer.target < shape[-1])
    place = answer.target.long().where(inside, 0)
    held = view.kept[..., None].expand_as(place).gather(2, place) & inside
    law(not (used & ~held).any(), "merge targets a token that is not kept")
    numbers = [answer.weight[used]]
    numbers += [] if answer.own is None else [answer.own[view.kept]]
    numbers += [] if answer.threshold is None else [answer.threshold]
    law(all(bool(x.isfinite().all()) for x in numbers), "merge returns a number that is not finite")
    return answer


def _weights(view: MergeView, answer: Merge) -> Float[Tensor, "B H L L"]:
    """Return by how much each token's vectors are in each kept token's."""
    held = view.kept.float()
    own = held if answer.own is None else answer.own.float().where(view.kept, 0)
    whole = torch.diag_embed(own)
    weight = answer.weight.float() * view.dropped[..., None]
    place = answer.target.long().where(weight != 0, 0)
    return whole.scatter_add(-1, place, weight)


def _check_chunk(
    selector: CompleteSelector, tokens: DrawnTokens, score: Float[Tensor, "N B H L"]
) -> None:
    """Plan the first half of each sequence, as after a chunk of its prompt, and then the rest."""
    half = tokens.length // 2
    early = tokens.position < half[None, :, None, None]
    chunk = dataclasses.replace(
        tokens, length=half, position=tokens.position.masked_fill(~early, -1)
    )
    there = chunk.position >= 0
    then = _scores(selector, chunk)
    finite = there & then.isfinite() & score.isfinite()  # protection of the newest ends
    law(
        bool(torch.isclose(then, score, rtol=1e-4, atol=1e-6)[finite].all()),
        "score of a token changes with the rest of its prompt, though plans_chunks is True",
    )
    # Any scores without ties: those of a method may be equal, and then either token may stay.
    drawn = torch.randn(score.shape, generator=torch.Generator().manual_seed(0))
    given = drawn.where(score.isfinite(), score)
    for page in (tokens.page, torch.ones_like(tokens.page)):
        after = _plans(selector, dataclasses.replace(chunk, page=page), given)
        left, pick = dataclasses.replace(
            tokens, page=page, tier=after.where(there, tokens.tier)
        ).without(there & (after == DROP))
        later = _plans(selector, left, pick(given))
        if selector.budget is not None:
            _check_budget(selector, chunk, after != DROP)
            _check_budget(selector, left, later != DROP)
    once = _plans(selector, dataclasses.replace(tokens, page=page), given)
    law(
        equal(_kept(left, later), _kept(tokens, once)),
        "plans after a chunk of a prompt and after the rest keep other tokens than one plan after "
        "the whole, though plans_chunks is True and a page has one token",
    )


def _kept(tokens: DrawnTokens, plan: UInt8[Tensor, "N B H L"]) -> Int[Tensor, "N B H L"]:
    """Return the positions of the kept tokens in order, padded with -1 to the longest sequence."""
    kept = tokens.position.masked_fill(plan == DROP, -1).sort(-1, descending=True).values
    return torch.nn.functional.pad(kept, (0, int(tokens.length.max()) - kept.shape[-1]), value=-1)


def _check_budget(selector: CompleteSelector, tokens: DrawnTokens, kept: Tensor) -> None:
    per_layer = kept.sum((2, 3))  # N B
    total = per_layer.sum(0, keepdim=True) if selector.scope == "model" else per_layer
    heads = tokens.shape.kv_heads * (tokens.shape.layers if selector.scope == "model" else 1)
    over = total > tokens.budget * heads
    if over.any():
        _, b = over.nonzero()[0].tolist()
        raise AssertionError(
            f"plan keeps {int(total[:, b].max())} tokens of a sequence over {heads} heads; its "
            f"budget of {int(tokens.budget[b])} per head allows {int(tokens.budget[b]) * heads}"
        )


def _check_step(
    selector: CompleteSelector, able: Capabilities, shape: CacheShape, seed: int
) -> None:
    view = decoding_step(selector, shape, seed)
    step = works("step failed, though decode is 'step'", selector.step, view)
    for name in ("candidate", "victim", "target"):
        tier = getattr(step, name)
        law(
            tier.shape == view.candidate.shape and tier.dtype == torch.uint8,
            f"a step's {name} is {tier.dtype} of shape {tuple(tier.shape)}; expected uint8 of "
            f"shape {tuple(view.candidate.shape)}",
        )
    again = selector.step(view)
    law(_same_step(step, again), "step differs on a second call")
    tiers = selector.tiers
    placed, moved = step.candidate != DROP, step.victim != NOBODY
    law(
        bool((step.candidate[placed] < tiers).all()),
        f"a step sends the candidate to a tier other than 0 to {tiers - 1} and DROP ({DROP})",
    )
    law(
        bool((step.victim[moved] < tiers).all()),
        f"a step's victim is a tier other than 0 to {tiers - 1} and NOBODY ({NOBODY})",
    )
    few = selector.victim_tiers
    law(
        bool((step.victim[moved] < few).all()),
        f"a step's victim is in a tier after the first {few}, though victim_tiers is {few}",
    )
    weakest = torch.cat((view.weakest[:few], torch.full_like(view.weakest[few:], torch.inf)))
    law(
        _same_step(step, selector.step(dataclasses.replace(view, weakest=weakest))),
        f"a step depends on the weakest token of a tier after the first {few}, though victim_tiers "
        f"is {few}",
    )
    victim = step.victim.masked_fill(~moved, 0).long()
    held = view.count.gather(0, victim[None])[0] > 0
    law(bool(held[moved].all()), "a step takes its victim from an empty tier")
    later = (step.target > step.victim) & ((step.target < tiers) | (step.target == DROP))
    law(bool(later[moved].all()), "a step moves its victim neither to a later tier nor to DROP")
    lost = moved & (step.target == DROP)
    law(
        able.shortens or not (lost | ~placed).any(),
        "step drops tokens, but the capabilities have shortens=False",
    )
    # Where one part evicts and another sorts, steps only sort: the evictor acts when it plans.
    if selector.budget is not None and not isinstance(selector.selector, SortedSelector):
        _check_step_budget(view, placed, lost)
    sequences = torch.arange(len(view.length))
    for b in sequences:
        alone = selector.step(cut_step(view, b[None], _EVERY))
        law(_same_step(_cut(step, b[None], _EVERY), alone), "a step depends on other sequences")
    if selector.scope == "layer":
        for layer in range(shape.layers):
            rows = slice(layer, layer + 1)
            alone = selector.step(layers_of(view, rows))
            found = Step(step.candidate[rows], step.victim[rows], step.target[rows])
            law(
                _same_step(found, alone),
                "a step of several layers differs from the step of each alone, though scope is "
                "'layer'; the layer of a row is first_layer + its index",
            )
    if able.splits_heads and shape.kv_heads > 1:
        heads = slice(shape.kv_heads // 2, shape.kv_heads)
        part = selector.step(cut_step(view, sequences, heads))
        law(
            _same_step(_cut(step, sequences, heads), part),
            "a step of a shard of the heads differs from the whole's, though splits_heads is True",
        )


def _check_step_budget(view: StepView, placed: Tensor, lost: Tensor) -> None:
    before = view.count.sum(0)  # N B H
    after = before + placed.long() - lost.long()
    each = (after <= before.maximum(view.budget[:, None])).all(2).all(0)
    most = (view.budget * before[:, 0].numel()).maximum(before.sum((0, 2)))
    law(
        bool((each | (after.sum((0, 2)) <= most)).all()),
        "a step makes a sequence grow beyond its budget",
    )


def _cut(step: Step, sequences: Tensor, heads: slice) -> Step:
    parts = (x[:, sequences][:, :, heads] for x in (step.candidate, step.victim, step.target))
    return Step(*parts)


def _same_step(a: Step, b: Step) -> bool:
    moved = a.victim != NOBODY  # without a victim the target is ignored
    target = Step(a.candidate, a.victim, torch.where(moved, a.target, b.target))
    pairs = zip(dataclasses.astuple(target), dataclasses.astuple(b), strict=True)
    return all(equal(x, y) for x, y in pairs)
