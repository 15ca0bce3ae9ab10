"""Scoring of layers' tokens by a selector after their attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kv_attention import Attended
from kv_policy import CacheShape, CompleteSelector, Queries, Running
from kv_runtime.batch import Batch, Pass, flat
from kv_runtime.retain.groups import fresh_group, layer_groups
from kv_runtime.retain.planning import Scored, adjust_layers, score_layers


@dataclass(frozen=True)
class Observed:
    """New tokens of a layer, as the selector reads them, and the observations of its attention."""

    key: Float[Tensor, "B H L D"]
    value: Float[Tensor, "B H L Dv"]
    result: Attended
    queries: Queries | None
    replayed: Float[Tensor, "B H L"] | None = None  # of a prompt, if the selector asks for a replay
    # Key and value as they are stored, if a prompt's plan reads them beside those that are scored.
    stored: tuple[Float[Tensor, "B Hs L Ds"], Float[Tensor, "B Hs L Dt"]] | None = None

    @property
    def kept(self) -> "Observed":
        """What scoring reads after later layers, without the output of attention."""
        out = self.result.out
        none = out.new_empty((*out.shape[:3], 0, out.shape[4]))
        return replace(self, result=replace(self.result, out=none, others=()))

    @property
    def tokens(self) -> int:
        """Observed tokens, over all sequences and heads."""
        return sum(mass.numel() for mass in self.result.mass)


def score(
    selector: CompleteSelector,
    batch: Batch,
    now: Pass,
    first: int,
    observed: Sequence[Observed],
    shape: CacheShape,
) -> Scored:
    """Score the tokens of the layers from `first` on, and store the scores.

    Only new tokens are scored if the selector scores them once, or if decode queries are not
    observed; attention then adjusts all scores at the end of a prompt. Nor are others scored in a
    decode step if the selector's `running` says how their scores go on, which attention may have
    applied; either all layers are `rescored` or none. `shape` is that of the model's own vectors.
    """
    over = now.over(len(observed))
    layers = slice(first, first + len(observed))
    what = selector, layers, shape if selector.scores_once else batch.shape
    key, value = observed[0].key, observed[0].value
    if selector.reads & {"keys", "values"}:  # otherwise they are not read
        key, value = _rows([o.key for o in observed]), _rows([o.value for o in observed])
    queries = None
    if "queries" in selector.reads:
        vectors = [o.queries.vectors for o in observed if o.queries is not None]
        queries = Queries(_rows(vectors), over.position) if vectors else None
    if not now.is_prefill and not selector.observe.generated:
        fresh = fresh_group(batch, over, key, value, selector.reads)
        return score_layers(*what, [fresh], over, queries)
    results = [o.result for o in observed]
    if selector.scores_once:
        new = score_layers(*what, [fresh_group(batch, over, key, value, selector.reads)], over)
        kept, reads = [o.stored for o in observed if o.stored is not None], selector.reads
        if kept:
            key, value = _rows([k for k, _ in kept]), _rows([v for _, v in kept])
        groups = layer_groups(
            batch, over, layers, key, value, reads if kept else frozenset(), results
        )
        groups[-1] = replace(groups[-1], score=new.split(new.score)[0])
        scored = replace(Scored.carried(groups), head_stats=new.head_stats, wrong=new.wrong)
        if not now.is_prefill or now.is_partial_prefill:
            return scored
        return adjust_layers(selector, layers, shape, scored, over)
    running = None if now.is_prefill else selector.running
    if running is not None:
        if not results[0].rescored:
            update_scores(batch, now, layers, results, running)
        fresh = fresh_group(batch, over, key, value, selector.reads, *_observed_last(results))
        return score_layers(*what, [fresh], over, queries)
    groups = layer_groups(batch, over, layers, key, value, selector.reads, results)
    replayed = observed[0].replayed  # with a replay prompts are scored one layer at a time
    scored = score_layers(*what, groups, over, queries, replayed)
    _note(batch, over, layers, scored)
    return scored


def score_new(
    selector: CompleteSelector,
    batch: Batch,
    now: Pass,
    key: Float[Tensor, "N B H 1 D"],
    value: Float[Tensor, "N B H 1 Dv"],
    results: Sequence[Attended],
) -> Float[Tensor, "N B H 1"]:
    """Score the new tokens of a decode pass whose stored tokens need none, or have theirs already.

    Args:
        selector: scores them, unless its `running` says how.
        batch: the stored tokens.
        now: the pass.
        key: keys of all layers.
        value: their values.
        results: those of all layers; if stored tokens are rescored, it is by `running`.
    """
    if results[0].rescored and selector.running is not None:
        mass = torch.stack([r.mass[-1] for r in results])
        seen = torch.stack([r.seen[-1] for r in results])
        position = now.position[:, None].expand(mass.shape)
        before = now.before[:, None, None]
        return selector.running.update(torch.zeros_like(mass), position, before, mass, seen)
    over = now.over(len(results))
    rows = key.flatten(0, 1), value.flatten(0, 1)
    observed = _observed_last(results) if selector.observe.generated else ()
    fresh = fresh_group(batch, over, *rows, selector.reads, *observed)
    scored = score_layers(selector, slice(0, len(results)), batch.shape, [fresh], over)
    score: Tensor = scored.score.unflatten(0, (len(results), -1))
    return score


def update_scores(
    batch: Batch, now: Pass, layers: slice, results: Sequence[Attended], running: Running
) -> None:
    """Update the scores of layers' tokens in stores and in the window, in place.

    A sequence without a new token was not observed and keeps its scores.
    """
    lead = len(results), -1, batch.shape.kv_heads
    rows = now.before[None, :, None].expand(lead).flatten()
    for part, (_, store) in enumerate(batch.held_stores):
        mass, seen = (flat(x) for x in _observed(results, part))
        store.accumulate_layers(layers, rows, mass, seen, running)
    raw = batch.held_window
    if raw is not None:
        mass, seen = (x.unflatten(0, lead[:2]) for x in _observed(results, -2))
        raw.accumulate(layers, now.before, mass, seen, running)


def _observed(results: Sequence[Attended], part: int) -> tuple[Tensor, Tensor]:
    """Return mass and counts of a part of the tokens, over all layers."""
    return _padded([r.mass[part] for r in results]), _padded([r.seen[part] for r in results])


def _observed_last(results: Sequence[Attended]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the observations of the new tokens, over all layers."""
    names = results[0].also[-1] if results[0].also else ()
    also = {name: _rows([r.also[-1][name] for r in results]) for name in names}
    return _rows([r.mass[-1] for r in results]), _rows([r.seen[-1] for r in results]), also


def _padded(each: list[Tensor]) -> Tensor:
    """Concatenate the rows of layers, with as many slots as that with the most."""
    most = max(x.shape[-1] for x in each)
    return _rows([x if x.shape[-1] == most else pad(x, (0, most - x.shape[-1])) for x in each])


def _note(batch: Batch, now: Pass, layers: slice, scored: Scored) -> None:
    """Store the new scores of tokens in stores and the window.

    A sequence without a new token was not observed and keeps its scores.
    """
    brings = (now.position >= 0).any(1)[:, None, None]
    for group, given in zip(scored.groups, scored.split(scored.score), strict=True):
        carried = given if group.score is None else given.where(brings, group.score)
        if group.store is not None:
            group.store.set_layers_scores(layers, flat(carried))
        elif not group.fresh and batch.window is not None:
            each = carried.unflatten(0, (-1, len(batch.seen)))
            batch.window.set_scores_of(layers, each)


def _rows(each: list[Tensor]) -> Tensor:
    """Concatenate the rows of layers, without a copy for a single layer."""
    return each[0] if len(each) == 1 else torch.cat(each)
