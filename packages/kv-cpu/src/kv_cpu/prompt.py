"""Prefill: many queries of a sequence over paged and dense tokens, for a prompt or a chunk.

Tokens are unpacked in blocks, each once for as many queries as fit in a core's cache, with an
online softmax (FlashAttention; Dao et al., 2022).
"""

import torch
from torch import Tensor

from kv_attention import Attended, AttentionInputs, Partial, Scored
from kv_attention.torch_backend import Forward, parts_of
from kv_cpu.arguments import parts, refused, softmax, to_attended, watches
from kv_cpu.few import MOST
from kv_cpu.library import chosen
from kv_policy import Observe


def attend_to_all(inputs: AttentionInputs, isa: str | None = None) -> Partial:
    """Compute attention over all parts; 0 and -inf for a query that is padding or sees no token.

    The output is in the dtype of the queries, the log-sum-exp in float32.

    Raises:
        RuntimeError: a table names a page outside its pool, or a length is out of range.
    """
    return attend_and_score(inputs, 0, isa).partial


def attend_and_score(inputs: AttentionInputs, scored: int, isa: str | None = None) -> Scored:
    """Compute attention over all parts, and the largest probabilities of the first `scored` ones.

    Scored parts are dense. Their logits are kept until the log-sum-exp of their queries is known;
    a thread keeps those of some queries at a time. A token that no query sees has probability 0.

    Raises:
        RuntimeError: as `attend_to_all`, or a scored part is in pages.
    """
    out, lse, *largest = _prompt(inputs, [], scored, isa)
    return Scored(Partial(out, lse), tuple(largest))


def attend_and_sum(
    inputs: AttentionInputs, what: Observe, isa: str | None = None
) -> tuple[Forward, Attended]:
    """Compute attention over all parts, and sums of probabilities over all queries with it.

    Weights are kept until the log-sum-exp of their queries is known, as `attend_and_score` does
    with logits, and rounded to 16 bits: the relative error of a sum is at most 2**-11, and that of
    a sum of squares 2**-10; where values are multiplied in bfloat16, 2**-8 and 2**-7.

    Args:
        inputs: the pass.
        what: an observation that `sums` is true for.
        isa: the instruction set to use; None: that of `chosen`.

    Raises:
        RuntimeError: as `attend_to_all`.
    """
    watch, _ = watches([what])
    out, lse, *found = _prompt(inputs, watch, 0, isa)
    (attended,) = to_attended(out, found, [what])
    return Forward(inputs, parts_of(inputs), out, lse), attended


def _prompt(
    inputs: AttentionInputs, watch: list[int], scored: int, isa: str | None
) -> list[Tensor]:
    found: list[Tensor] = torch.ops.kv_cpu.prompt(
        inputs.q,
        inputs.position.long().contiguous(),
        *parts(inputs, watched=bool(watch)),
        watch,
        scored,
        inputs.value_dim,
        inputs.scale,
        *softmax(inputs),
        isa or chosen(),
    )
    return found


def sums(inputs: AttentionInputs, what: Observe) -> bool:
    """Return whether `attend_and_sum` sums this observation: one sum over all queries."""
    of_all = what.last is None or what.last >= inputs.q.shape[3]
    plain = what.above is None and what.gumbel is None and not what.also
    return of_all and plain and what.skip <= 1 and what.group != "max"


def attend_partly(inputs: AttentionInputs, scored: int) -> Scored | None:
    """Do the same; None if `declined` returns a reason."""
    return attend_and_score(inputs, scored) if declined(inputs) is None else None


def declined(inputs: AttentionInputs, isa: str | None = None) -> str | None:
    """Return why torch computes a pass of many queries; None if native code does."""
    queries = inputs.q.shape[3]
    if queries <= MOST:
        return f"{queries} queries of a sequence; native code supports {MOST} over pages alone"
    if (isa or chosen()) == "plain":
        return "native prefill needs AVX2 or more, and this is `plain`"
    return refused(inputs)
