"""The backend `cpu` of kv-attention: native code if it is faster, torch otherwise."""

import torch

from kv_attention import Attended, AttentionInputs
from kv_attention.torch_backend import attend as attend_in_torch
from kv_cpu import attention_mass, prompt
from kv_cpu.arguments import parts, refused, softmax, to_attended, watches
from kv_cpu.library import chosen


def attend(inputs: AttentionInputs, isa: str | None = None) -> Attended:
    """Compute attention over all parts, natively unless `declined` returns a reason.

    Products and sums are in float32 for all dtypes of queries; the output has the queries' dtype.

    Args:
        inputs: the pass.
        isa: the instruction set to use; None: that of `chosen`.

    Raises:
        RuntimeError: a table names a page outside its pool, or a length is out of range.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that is unavailable here.
    """
    if inputs.q.shape[3] > 1:
        return attention_mass.attend(inputs, isa)
    if declined(inputs) is not None:
        return attend_in_torch(inputs)
    found = torch.ops.kv_cpu.decode(
        inputs.q,
        inputs.position.long().contiguous(),
        *parts(inputs, watched=inputs.observed),
        *watches(inputs.observations),
        inputs.value_dim,
        inputs.scale,
        *softmax(inputs),
        isa or chosen(),
    )
    out = found[0][:, :, :, None].to(inputs.q.dtype)
    return Attended.of(to_attended(out, found[2:], inputs.observations))


def declined(inputs: AttentionInputs) -> str | None:
    """Return why torch computes a pass instead of native code; None if native code does.

    For a pass of several queries this concerns its output; `attention_mass.declined` concerns its
    observations.
    """
    if inputs.q.shape[3] != 1:
        return prompt.declined(inputs)
    if any(what.gumbel is not None for what in inputs.observations if what.last != 0):
        return "attention under Gumbel noise is observed"
    return refused(inputs)
