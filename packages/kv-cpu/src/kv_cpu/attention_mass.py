"""A pass of several queries per sequence, and its attention-mass pass.

The attention matrix is never stored: its blocks are recomputed from the log-sum-exp of the pass and
summed over the queries.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kv_attention import Attended, AttentionInputs
from kv_attention.torch_backend import Forward, attention_mass, forward, parts_of
from kv_cpu import prompt
from kv_cpu.arguments import parts, refused, to_attended, watches
from kv_cpu.few import multi_query_decode
from kv_cpu.library import chosen
from kv_policy import Observe


def attend(inputs: AttentionInputs, isa: str | None = None) -> Attended:
    """Compute attention, then sum the attention mass natively unless `declined` returns a reason.

    Attention of many queries is native unless `prompt.declined` returns a reason, and that of few
    queries over pages. Native attention sums one observation of all queries itself (`prompt.sums`);
    all others are computed together, in float32. Errors are those of `backend.attend`.
    """
    summed: dict[Observe, Attended] = {}
    if prompt.declined(inputs, isa) is None:
        first = next((what for what in inputs.observations if prompt.sums(inputs, what)), None)
        if first is None:
            found = prompt.attend_to_all(inputs, isa)
            done = Forward(inputs, parts_of(inputs), found.out, found.lse)
        else:
            done, summed[first] = prompt.attend_and_sum(inputs, first, isa)
    else:
        done = forward(inputs, multi_query_decode(inputs, isa))
    rest = [what for what in inputs.observations if what not in summed]
    native = [what for what in rest if declined(inputs, what) is None]
    summed |= zip(native, observe_all(done, native, isa), strict=True)
    return Attended.of(
        summed[what] if what in summed else attention_mass(done, what)
        for what in inputs.observations
    )


def observe_all(
    done: Forward, watched: Sequence[Observe], isa: str | None = None
) -> list[Attended]:
    """Sum the attention mass of a pass for several observations, none of them declined."""
    found: Sequence[Tensor] = ()
    inputs = done.inputs
    length = inputs.q.shape[3]
    last = [length if what.last is None else what.last for what in watched if what.last != 0]
    if last:
        found = torch.ops.kv_cpu.attention_mass(
            inputs.q,
            inputs.position.long().contiguous(),
            done.lse.contiguous(),
            *parts(inputs, watched=True),
            *watches(watched),
            last,
            done.out.shape[-1],
            inputs.scale,
            inputs.softcap or 0.0,
            isa or chosen(),
        )
    return to_attended(done.out, found, watched)


def declined(inputs: AttentionInputs, what: Observe) -> str | None:
    """Return why torch computes this observation of a pass; None if native code does."""
    if what.gumbel is not None:
        return "attention under Gumbel noise is observed"
    return refused(inputs)
