"""Attention in plain torch, in blocks: a layer is never dequantized as a whole."""

from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import add
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from kv_attention import flash
from kv_attention.blockwise import blockwise
from kv_attention.chosen import Choice
from kv_attention.gumbel import perturbed_lse
from kv_attention.inputs import AttentionInputs
from kv_attention.observe import last_columns, last_queries, observe_part
from kv_attention.partial import Partial
from kv_attention.parts import AttentionPart, DensePart, PagedPart
from kv_attention.tokens import Attended
from kv_policy import Observe


class Forward(NamedTuple):
    """The result of a pass over all parts, before the attention-mass pass.

    `lse` is the log-sum-exp of each query's logits over all parts and its sink, in the dtype of the
    sums. `choice` has the tokens that queries attend to; None: all that they see.
    """

    inputs: AttentionInputs
    parts: Sequence[AttentionPart]
    out: Float[Tensor, "B H G L Dv"]
    lse: Float[Tensor, "B H G L"]
    choice: Choice | None = None


def attend(inputs: AttentionInputs) -> Attended:
    """Compute attention part by part and merge; then sum the observed attention mass.

    Logits and sums are in float32, or in float64 if the queries are. A temporary holds about
    `parts.room` elements; the new chunk uses a fused kernel of torch if one supports the input.
    """
    done = forward(inputs)
    return Attended.of(attention_mass(done, what) for what in inputs.observations)


def forward(inputs: AttentionInputs, stored: Partial | None = None) -> Forward:
    """Compute attention part by part and merge; the output is in the dtype of the queries.

    `stored` is the attention over all pages without sinks, if it has been computed by other means.
    """
    parts = parts_of(inputs)
    left = parts if stored is None else parts[len(inputs.pages) :]
    choice = None
    if inputs.chosen is not None:
        choice = Choice.of(inputs.chosen, inputs.q, inputs.position, parts)
    total = partial_of(inputs, left, stored, choice)
    return Forward(inputs, parts, total.out.to(inputs.q.dtype), total.lse, choice)


def partial_of(
    inputs: AttentionInputs,
    parts: Sequence[AttentionPart],
    stored: Partial | None = None,
    choice: Choice | None = None,
) -> Partial:
    """Compute attention part by part and merge, `stored` too; 0 and -inf for padding queries."""
    q, position = inputs.q, inputs.position

    @cache
    def scaled() -> Tensor:  # lazy: a prompt without stored tokens needs no copy of its queries
        return q.to(inputs.sum_dtype) * inputs.scale

    partials = [_partial(inputs, scaled, part, choice) for part in parts]
    partials += [] if stored is None else [stored]
    total = reduce(add, partials) if partials else Partial.empty(q, inputs.value_dim)
    if inputs.sinks is not None:
        total = total.with_sinks(inputs.sinks)
    real = position >= 0
    # A decode step skips the check, which would synchronize with the device.
    if position.shape[1] == 1 or not real.all():
        total = total.only(real)
    return total


def parts_of(inputs: AttentionInputs) -> list[AttentionPart]:
    """Return all parts in the compute dtype of these queries, pages first."""
    dtype = inputs.sum_dtype
    pages = zip(inputs.pages, inputs.page_positions, strict=True)
    return [
        *(PagedPart.of(part, dtype, at) for part, at in pages),
        *(DensePart.of(tokens, dtype) for tokens in inputs.dense),
    ]


def attention_mass(done: Forward, what: Observe) -> Attended:
    """Return the output, and the attention mass of each part's tokens."""
    if what.last == 0:
        return Attended(done.out)
    rows, places, lse = last_queries(done.inputs.q, done.inputs.position, done.lse, what.last)
    rows = rows.to(lse.dtype) * done.inputs.scale
    softcap, choice = done.inputs.softcap, done.choice
    columns = None if choice is None else last_columns(done.inputs.position, what.last)
    if choice is not None and columns is not None:
        choice = choice.gathered(columns.clamp(min=0))
    if what.gumbel is not None:
        softmax = softcap, done.inputs.sinks
        lse = perturbed_lse(rows, places, done.parts, what.gumbel, *softmax, choice)
    found = [observe_part(rows, places, lse, part, what, softcap, choice) for part in done.parts]
    return Attended(
        done.out,
        tuple(sums.mass for sums in found),
        tuple(sums.seen for sums in found),
        tuple(sums.also for sums in found),
    )


def _partial(
    inputs: AttentionInputs,
    scaled: Callable[[], Float[Tensor, "B H G L D"]],
    part: AttentionPart,
    choice: Choice | None,
) -> Partial:
    q, position = inputs.q, inputs.position
    if inputs.softcap is not None or choice is not None:  # torch's fused kernel has neither
        return blockwise(scaled(), position, part, inputs.value_dim, inputs.softcap, choice)
    if isinstance(part, DensePart) and flash.is_causal(q, position, part):
        return flash.causal(q, part, inputs.scale)
    if isinstance(part, PagedPart) and flash.is_worth_it(q, inputs.value_dim):
        return flash.stored(scaled(), position, part)
    if isinstance(part, DensePart) and flash.comes_before(q, position, part):
        return flash.before(q, part, inputs.scale)
    return blockwise(scaled(), position, part, inputs.value_dim)
