"""The backend `cpu` of kv-attention: native code where it is faster, torch everywhere else."""

import torch

from kv_attention import Attended, AttentionInputs
from kv_attention.torch_backend import attend as attend_in_torch
from kv_cpu import attention_mass, prompt
from kv_cpu.arguments import parts, refused, to_attended, watches
from kv_cpu.library import chosen


def attend(inputs: AttentionInputs, isa: str | None = None) -> Attended:
    """Attend to all parts, natively unless `declined` returns a reason.

    Products and sums are in float32, whatever the dtype of the queries; the output has theirs.

    Args:
        inputs: the pass.
        isa: the instruction set to use; None: what `chosen` returns.

    Raises:
        RuntimeError: a table names a page that its pool does not have, or a length is impossible.
        OSError: the library cannot be loaded.
        ValueError: the environment names an instruction set that does not run here.
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
        isa or chosen(),
    )
    out = found[0][:, :, :, None].to(inputs.q.dtype)
    return Attended.of(to_attended(out, found[2:], inputs.observations))


def declined(inputs: AttentionInputs) -> str | None:
    """Return why torch makes a pass instead of native code; None if it does not.

    Of a pass of several queries this is about its output; `attention_mass.declined` is about what
    is observed of it.
    """
    if inputs.q.shape[3] != 1:
        return prompt.declined(inputs)
    if any(what.gumbel is not None for what in inputs.observations if what.last != 0):
        return "attention under Gumbel noise is observed"
    return refused(inputs)
