"""Assisted generation over a compressed cache: drafts are stored once they are right.

Transformers verifies drafts in one pass with the token before them, and then crops the cache by
those that were wrong. A draft attends as it would if it were generated alone, and is stored when
the next pass, or a crop, tells that it was right; see `kv_runtime.pending`.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kv_policy import CacheShape, KVPolicy, Raw
from kv_runtime import Column, PolicyCache, Verified, unlike_drafts

KEPT = "logits_to_keep"  # the argument of a model by which a pass has more logits than one


def drafts_of(kwargs: Mapping[str, object]) -> int:
    """Return the drafts of a pass of assisted generation: it keeps their logits and one more."""
    kept = kwargs.get(KEPT)
    return max(0, kept - 1) if isinstance(kept, int) else 0


def unread(kwargs: Mapping[str, object], columns: int) -> dict[str, object]:
    """Return the arguments of a pass without the tokens that a cache holds.

    Assisted generation begins with the whole prompt, whatever the cache holds. Only what follows
    the stored tokens is read if that is the last token of the prompt, and drafts.

    Args:
        kwargs: the arguments of the model.
        columns: columns that the cache holds.
    """
    ids, position, kept = (kwargs.get(name) for name in ("input_ids", "position_ids", KEPT))
    found = dict(kwargs)
    if not (isinstance(ids, Tensor) and isinstance(position, Tensor) and isinstance(kept, int)):
        return found
    again = ids.shape[1] == position.shape[-1] == columns + kept
    if columns and kept and again and not bool(position[..., 0].any()):
        found |= {"input_ids": ids[:, columns:], "position_ids": position[..., columns:]}
    return found


def is_exact(policy: KVPolicy) -> bool:
    """Whether stored tokens are those of the model, so that any pass attends to the same."""
    plain = policy.selector is None and policy.basis is None and policy.reading is None
    return plain and (policy.formats is None or isinstance(policy.formats, Raw))


def expect_drafts(
    policy: KVPolicy, shape: CacheShape, *, held: int, columns: int, drafts: int, indexed: bool
) -> None:
    """Raise if a pass with drafts would not give what it gives without them.

    Args:
        policy: the policy.
        shape: the shape of the cache.
        held: columns that the cache holds.
        columns: columns of the pass.
        drafts: the last of these.
        indexed: whether layers select tokens.

    Raises:
        ValueError: the policy does more with a generated token than to store it, a token is one
            vector or selected by an indexer, or the pass has more than one token before the drafts.
    """
    why = unlike_drafts(policy)
    if why is None and (shape.value_in_key or indexed):
        why = "this model has latent attention or selects tokens, for which it is not supported"
    if why is not None:
        raise ValueError(
            f"{policy} cannot verify drafts, as {why}; generate without an assistant or prompt "
            "lookup, or use a policy that plans after prompts alone, such as snapkv, and a model "
            "of keys and values"
        )
    if not held or columns != 1 + drafts:
        raise ValueError(
            f"assisted generation reads {columns - drafts} tokens of a prompt in one pass with "
            f"{drafts} drafts, which would see it uncompressed under {policy}; read all of the "
            "prompt but its last token first, as model(ids[:, :-1], cache=cache), and then pass "
            "ids and the cache to generate"
        )


def attend_verified(
    runtime: PolicyCache,
    verified: Verified,
    layer: int,
    query: Float[Tensor, "B H G L D"],
    key: Float[Tensor, "B H L D"],
    value: Float[Tensor, "B Hv L Dv"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "H G"] | None = None,
    *,
    more: bool = False,
) -> Float[Tensor, "B Hv Gv L _"]:
    """Attend as `PolicyCache.attend` in a pass of a token and drafts after it.

    Raises:
        ValueError: some columns have no query.
    """
    if query.shape[3] != key.shape[2]:
        raise ValueError(
            f"{query.shape[3]} queries attend in a pass of {key.shape[2]} columns with drafts; "
            "generate without an assistant or prompt lookup"
        )
    tokens: list[Column] = [
        (query[:, :, :, i : i + 1], key[:, :, i : i + 1], value[:, :, i : i + 1])
        for i in range(key.shape[2])
    ]
    options = scale, softcap, sinks
    drafts = verified.attend(layer, tokens, *options, more=more)
    first = runtime.attend(layer, *tokens[0], *options, more=more)
    return torch.cat((first, *drafts), 3)
