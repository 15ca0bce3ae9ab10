"""Many queries of a sequence over pages and plain tokens, such as a prompt or a chunk of one.

Tokens are unpacked in blocks, each once for as many queries as a core's cache has room for, and
attended to with an online softmax (FlashAttention; Dao et al., 2022).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention import DenseTokens
from kv_attention.partial import Partial
from kv_cpu.arguments import parts, refused
from kv_cpu.few import MOST
from kv_cpu.library import chosen
from kv_policy import PagedTokens


def attend_to_all(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    scale: float,
    isa: str | None = None,
) -> Partial:
    """Attend to all parts; 0 and -inf for a query that is padding or sees nothing.

    The output is in the dtype of the queries, the log-sum-exp in float32.

    Raises:
        RuntimeError: a table names a page that its pool does not have, or a length is impossible.
    """
    isa = isa or chosen()
    out, lse = torch.ops.kv_cpu.prompt(
        q,
        position.long().contiguous(),
        *parts(pages, [None] * len(pages), dense, watched=False),
        value_dim,
        scale,
        isa,
    )
    return Partial(out, lse)


def declined(
    q: Float[Tensor, "B H G L D"],
    pages: Sequence[PagedTokens],
    dense: Sequence[DenseTokens],
    value_dim: int,
    isa: str | None = None,
) -> str | None:
    """Say why a pass of many queries goes to torch; None if native code makes it."""
    if q.shape[3] <= MOST:
        return f"{q.shape[3]} queries of a sequence; up to {MOST} are native over pages alone"
    if (isa or chosen()) == "plain":
        return "prompts are attended to natively with AVX2 or more, and this is `plain`"
    return refused(q, pages, dense, value_dim)
