"""Running a model with a cache: prefill, greedy decoding, and log-likelihoods."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_transformers import passing

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


@torch.inference_mode()
def read(
    model: "PreTrainedModel", cache: "Cache", tokens: Int[Tensor, "B L"]
) -> Float[Tensor, "B V"]:
    """Run one forward pass over tokens; return the logits after the last ones."""
    out = model(
        input_ids=tokens.to(model.device), **passing(model, cache), use_cache=True, logits_to_keep=1
    )
    logits: Tensor = out.logits
    return logits[:, -1].float()


def answer(
    model: "PreTrainedModel",
    cache: "Cache",
    logits: Float[Tensor, "B V"],
    count: int,
    ends: Collection[int] = (),
    enough: Callable[[int, Sequence[int]], bool] = lambda sequence, tokens: False,
) -> tuple[tuple[int, ...], ...]:
    """Generate up to `count` tokens per sequence greedily, from the logits after the cached tokens.

    A sequence ends before a token of `ends`. All end as soon as each has ended or has `enough`,
    which is called with a sequence's number and its tokens so far. The last tokens are not added to
    the cache, since no step follows.
    """
    steps: list[Tensor] = []
    stops = torch.tensor(sorted(ends), device=logits.device)
    ended = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    while True:
        token = logits.argmax(-1)
        steps.append(token)
        ended |= torch.isin(token, stops)
        if len(steps) == count or ended.all():
            break
        said = zip(torch.stack(steps, -1).tolist(), ended.tolist(), strict=True)
        if all(over or enough(i, tokens) for i, (tokens, over) in enumerate(said)):
            break
        logits = read(model, cache, token[:, None])
    return tuple(_until(row, ends) for row in torch.stack(steps, -1).tolist())


def forced(
    model: "PreTrainedModel",
    cache: "Cache",
    logits: Float[Tensor, "B V"],
    targets: Int[Tensor, "B L"],
) -> Iterator[Float[Tensor, "B V"]]:
    """Yield the logits that predict each target, from those after the cached tokens on.

    The targets are fed token by token, as in generation, so per-step compression takes effect here
    too.
    """
    for i in range(targets.shape[1]):
        if i:
            logits = read(model, cache, targets[:, i - 1 : i])
        yield logits


def ends_of(model: "PreTrainedModel") -> frozenset[int]:
    """Return the tokens that end a model's answer."""
    config = model.generation_config
    ends = config.eos_token_id if config is not None else None
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def _until(tokens: list[int], ends: Collection[int]) -> tuple[int, ...]:
    place = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[:place])
