"""One forward pass over a prompt for several compressed caches.

Over an empty cache a prompt attends to itself alone, so what the model computes does not depend on
the policy; only what is stored does. Policies that observe the same share the pass.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Int
from torch import Tensor

from kv_policy import Observe
from kv_serve.evaluate.decode import read

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from kv_serve.hf.cache import CompressedCache


def read_prompt(
    model: "PreTrainedModel", caches: Sequence["Cache"], tokens: Int[Tensor, "B L"]
) -> None:
    """Let empty caches take in the same prompt, in as few forward passes as it takes.

    Args:
        model: the model of all caches.
        caches: compressed caches, and others, which get a pass of their own.
        tokens: the prompt.
    """
    from kv_serve.hf.cache import CompressedCache

    own = [cache for cache in caches if not isinstance(cache, CompressedCache)]
    ours = [cache for cache in caches if isinstance(cache, CompressedCache)]
    for cache in own:
        read(model, cache, tokens)
    for leader, followers in _groups(ours):
        leader.tiered.followers = tuple(cache.tiered for cache in followers)
        read(model, leader, tokens)


def _groups(
    caches: Sequence["CompressedCache"],
) -> list[tuple["CompressedCache", list["CompressedCache"]]]:
    """Caches with equal observations, each group behind one that makes them."""
    groups: dict[Observe, list[CompressedCache]] = {}
    idle = []
    for cache in caches:
        selector = cache.policy.selector
        if selector is None or selector.observe.last == 0:
            idle.append(cache)
        else:
            groups.setdefault(selector.observe, []).append(cache)
    found = [*groups.values()] or [[]]
    found[0] = [*found[0], *idle]
    return [(group[0], group[1:]) for group in found if group]
