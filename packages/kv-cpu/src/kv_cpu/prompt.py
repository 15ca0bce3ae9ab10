"""Many queries of a sequence over pages and plain tokens, such as a prompt or a chunk of one.

Tokens are unpacked in blocks, each once for as many queries as a core's cache has room for, and
attended to with an online softmax (FlashAttention; Dao et al., 2022).
"""

import torch

from kv_attention import AttentionInputs, Partial
from kv_cpu.arguments import parts, refused
from kv_cpu.few import MOST
from kv_cpu.library import chosen


def attend_to_all(inputs: AttentionInputs, isa: str | None = None) -> Partial:
    """Attend to all parts; 0 and -inf for a query that is padding or sees nothing.

    The output is in the dtype of the queries, the log-sum-exp in float32.

    Raises:
        RuntimeError: a table names a page that its pool does not have, or a length is impossible.
    """
    out, lse = torch.ops.kv_cpu.prompt(
        inputs.q,
        inputs.position.long().contiguous(),
        *parts(inputs, watched=False),
        inputs.value_dim,
        inputs.scale,
        isa or chosen(),
    )
    return Partial(out, lse)


def declined(inputs: AttentionInputs, isa: str | None = None) -> str | None:
    """Return why torch makes a pass of many queries; None if native code does."""
    queries = inputs.q.shape[3]
    if queries <= MOST:
        return f"{queries} queries of a sequence; up to {MOST} are native over pages alone"
    if (isa or chosen()) == "plain":
        return "prompts are attended to natively with AVX2 or more, and this is `plain`"
    return refused(inputs)
