"""Find the rotary embedding of each layer by running a few tokens through the loaded model."""

import inspect
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Module
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from kv_policy import KVPolicy
from kv_runtime import find_rope, growing_kind, model_frequencies, probe_positions
from kv_serve.vllm.config import UnservableError

TOKENS: Final = 5


def find_ropes(
    config: VllmConfig, policy: KVPolicy, model: Module | None, layers: Sequence[Attention]
) -> None:
    """Set the rotary embedding of each layer's implementation; all weights are loaded.

    The layers return zeros without metadata of a step, so the vectors of equal tokens differ only
    by what their positions do to them. Under tensor parallelism all ranks run the model alike.

    Raises:
        UnservableError: a layer applies something else, or the model cannot be run this way.
    """
    why = f"{policy} rotates vectors to other positions, but"
    other = "use a policy that needs no rotation, such as kv-compress"
    taken = {} if model is None else inspect.signature(model.forward).parameters
    if model is None or not {"input_ids", "positions"} <= taken.keys():
        raise UnservableError(f"{why} this model cannot be run to find its rotation; {other}")
    if kind := growing_kind(model):
        raise UnservableError(
            f"{why} the rotary embedding of this model ({kind}) changes with the length of the "
            f"sequence; {other}"
        )
    if config.model_config.uses_mrope:
        raise UnservableError(f"{why} this model counts positions in several dimensions; {other}")
    positions = probe_positions(config.model_config.max_model_len - 1)
    vectors = _vectors(config, model, layers, positions)
    frequencies = tuple(model_frequencies(model))
    for index, (layer, each) in enumerate(zip(layers, vectors, strict=True)):
        layer.impl.rope = find_rope(each, positions, frequencies)
        if layer.impl.rope is None:
            raise UnservableError(
                f"{why} layer {index} of this model changes them with their position in a way that "
                "is not a supported rotary embedding (halves or interleaved pairs rotated by "
                f"frequencies of the model, or none); {other}"
            )


def _vectors(
    config: VllmConfig, model: Module, layers: Sequence[Attention], positions: Sequence[int]
) -> list[Tensor]:
    """Return each layer's queries and keys of a few tokens at these positions."""
    device = config.device_config.device
    ids = (torch.arange(TOKENS, device=device) * 7 + 3) % config.model_config.get_vocab_size()
    rows = ids.repeat_interleave(len(positions))
    place = torch.tensor(positions, device=device).repeat(TOKENS)
    for layer in layers:
        layer.impl.seen = []
    context = set_forward_context(None, config, num_tokens=len(rows), skip_compiled=True)
    with torch.no_grad(), context:
        model(rows, place)
    found = [torch.cat(layer.impl.seen) for layer in layers]
    for layer in layers:
        layer.impl.seen = None
    return [each.unflatten(0, (TOKENS, len(positions))) for each in found]
