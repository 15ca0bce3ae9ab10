"""One forward pass over a prompt for several compressed caches.

With an empty cache a prompt attends to itself alone, so the model's computation depends only on the
basis of a policy, and on whether the prompt is read again; the stored tokens depend on the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from kv_eval.evaluate.decode import read

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from kv_transformers import CompressedCache


def read_prompt(
    model: "PreTrainedModel", caches: Sequence["Cache"], tokens: Int[Tensor, "B L"]
) -> None:
    """Prefill empty caches with the same prompt, in one forward pass per basis and replay.

    Args:
        model: the model of all caches.
        caches: compressed caches, and others, which get separate passes.
        tokens: the prompt.
    """
    from kv_transformers import CompressedCache

    own = [cache for cache in caches if not isinstance(cache, CompressedCache)]
    ours = [cache for cache in caches if isinstance(cache, CompressedCache)]
    for cache in own:
        read(model, cache, tokens)
    while ours:
        leader = ours[0]
        alike = [cache for cache in ours if _alike(cache, leader)]
        ours = [cache for cache in ours if cache not in alike]
        leader.share_prefill(alike[1:])
        read(model, leader, tokens)


def _alike(one: "CompressedCache", other: "CompressedCache") -> bool:
    if one.runtime.replay != other.runtime.replay:
        return False
    mine, theirs = one.runtime.bases, other.runtime.bases
    if mine is None or theirs is None:
        return mine is theirs
    return mine.same_as(theirs)
