"""Gumbel noise on logits, for policies that score tokens by perturbed attention."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_attention.blockwise import logits
from kv_attention.chosen import Choice
from kv_attention.parts import AttentionPart, block_sizes, reach


def noise(query: Int[Tensor, "..."], token: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return a sample of the standard Gumbel distribution for each pair of positions.

    A 32-bit hash of the pair (the finalizer of MurmurHash3) yields a uniform number in (0, 1).
    """
    mask = 0xFFFFFFFF
    x = (query.long() * 0x9E3779B1 + token.long() * 0x85EBCA77) & mask
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        x = ((x ^ (x >> shift)) * multiplier) & mask
    x = x ^ (x >> 16)
    uniform = (x >> 9).float().add_(0.5).div_(2**23)  # exact in float32
    return -torch.log(-torch.log(uniform))


def perturb(
    x: Float[Tensor, "B H G L S"],
    position: Int[Tensor, "B L"],
    token: Int[Tensor, "B _ S"],
    temperature: float,
) -> None:
    """Add the noise to logits and divide by the temperature, in place."""
    pairs = noise(position[:, None, None, :, None], token[:, :, None, None])
    x.add_(pairs.to(x.dtype)).div_(temperature)


def perturbed_lse(
    q: Float[Tensor, "B H G L D"],
    position: Int[Tensor, "B L"],
    parts: Sequence[AttentionPart],
    temperature: float,
    softcap: float | None,
    sinks: Float[Tensor, "H G"] | None,
    choice: Choice | None = None,
) -> Float[Tensor, "B H G L"]:
    """Return the log-sum-exp of the perturbed logits over all parts; sinks take no noise."""
    size, tokens = block_sizes(q, q.shape[-1])
    total = q.new_full(q.shape[:-1], -torch.inf)
    if sinks is not None:
        total.copy_((sinks.to(q.dtype) / temperature)[..., None])
    for part in parts:
        spans = list(part.spans(tokens))
        for at, (first, _) in zip(spans, reach(position, part, spans, 0), strict=True):
            keys, place = part.keys(at), part.position(at)
            for start in range(first // size * size, q.shape[3], size):
                chunk = slice(start, start + size)
                x = logits(q[..., chunk, :], keys, softcap)
                perturb(x, position[:, chunk], place, temperature)
                seen = part.visible(at, position[:, chunk])
                if choice is not None:
                    seen = choice[chunk].among(seen, place)
                if seen is not None:
                    x.masked_fill_(~seen[:, :, None], -torch.inf)
                total[..., chunk] = torch.logaddexp(total[..., chunk], x.logsumexp(-1))
    return total
