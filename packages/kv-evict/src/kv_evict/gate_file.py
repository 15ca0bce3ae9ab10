"""The file of a gate: weights for every KV head of a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from jaxtyping import Float
from msgspec import Meta
from torch import Tensor

from kv_evict.gate_features import products, width
from kv_policy import CacheShape, LayerView, NotCalibratedError
from kv_policy.decoding import decode
from kv_policy.tensor_files import Stamp, read, stamp, write

FORMAT: Final = "kv-evict gate 1"
CALIBRATION: Final = "gate"
_SUFFIX: Final = ".safetensors"

Count = Annotated[int, Meta(ge=1)]


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The header of a gate's file: model, text, sizes, and how well it predicts."""

    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the calibration text
    digest: str  # of that text
    tokens: Count
    window: Count  # tokens that were repeated at once
    layers: Count
    heads: Count  # KV heads per layer
    key_dim: Count
    value_dim: Count
    overlap: Mapping[str, float]  # with the target's choice on other text, by kept share


@dataclass(frozen=True, eq=False)
class GateWeights:
    """A gate in memory; two are equal only if they are the same."""

    facts: Facts
    weight: Float[Tensor, "N H F"]  # float32
    quantiles: Float[Tensor, " Q"]  # ascending scores of other text, equally many between each two

    def threshold(self, share: float) -> float:
        """Return the score that this share of the tokens of the calibration's texts exceeds."""
        place = (1 - share) * (len(self.quantiles) - 1)
        low = min(int(place), len(self.quantiles) - 2)
        pair = self.quantiles[low : low + 2].double()
        return float(pair[0] + (pair[1] - pair[0]) * (place - low))

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the predicted attention probability of each token in view.

        Raises:
            ValueError: layers, heads or dimensions differ from the calibrated model.
        """
        assert view.keys is not None  # they are read
        assert view.values is not None
        shape, heads = view.shape, view.keys.shape[1]
        self._expect(shape)
        weight = self.on(view.keys.device)[:, shape.first_head : shape.first_head + heads]
        mine = weight[view.layer][:, :, None]  # B H 1 F
        position = view.position.clamp(min=0)
        turned = shape.turned(mine[..., : shape.key_dim], position, view.layer)
        pairs = shape.pair_norms(view.keys, view.layer)
        logarithm = products(mine, turned, view.keys, pairs, view.values)
        return logarithm.clamp(max=0).exp()  # a probability

    def _expect(self, shape: CacheShape) -> None:
        facts = self.facts
        for what, here, fitted in (
            ("layers", shape.layers, facts.layers),
            ("dimensions in a key", shape.key_dim, facts.key_dim),
            ("dimensions in a value", shape.value_dim, facts.value_dim),
        ):
            if here != fitted:
                raise ValueError(
                    f"gate: the weights are of a model with {fitted} {what}, but this cache has "
                    f"{here}; calibrate its own model"
                )
        last = shape.first_head + shape.kv_heads
        if last > facts.heads:
            raise ValueError(
                f"gate: the weights are of a model with {facts.heads} KV heads, but this cache has "
                f"heads up to {last - 1}; calibrate its own model"
            )

    def on(self, device: torch.device) -> Float[Tensor, "N H F"]:
        """Return the weights on a device; cached."""
        return _placed(self, device)


def save(path: Path, gate: GateWeights) -> None:
    """Write a gate atomically.

    Raises:
        ValueError: the sizes in the facts differ from those of the weights, or a number is not
            finite.
        OSError: writing failed; an existing file is unchanged.
    """
    _check(path, gate)
    tensors = {"weight": gate.weight, "quantiles": gate.quantiles}
    write(path, FORMAT, msgspec.json.encode(gate.facts).decode(), tensors)


def load(file: str) -> GateWeights:
    """Load a gate by its path or the name of one in this package; cached until the file changes.

    Raises:
        NotCalibratedError: the file does not exist.
        ValueError: it is damaged or no gate.
    """
    path = located(file)
    try:
        return _load(stamp(path))
    except FileNotFoundError:
        raise NotCalibratedError("gate", file, CALIBRATION) from None


def located(file: str) -> Path:
    """Return the path of a gate: a file, or one of this package if there is no such file."""
    path = Path(file)
    if file in shipped() and not path.exists():
        return Path(str(files("kv_evict") / "gates" / f"{file}{_SUFFIX}"))
    return path


@lru_cache(maxsize=1)
def shipped() -> tuple[str, ...]:
    """Return the names of the gates in this package."""
    names = (each.name for each in (files("kv_evict") / "gates").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


@lru_cache(maxsize=8)
def _placed(gate: GateWeights, device: torch.device) -> Float[Tensor, "N H F"]:
    with torch.inference_mode(False):  # cached tensors outlive the caller
        return gate.weight.to(device)


@lru_cache(maxsize=8)
def _load(file: Stamp) -> GateWeights:
    text, tensors = read(file.path, FORMAT, CALIBRATION)
    try:
        facts = decode(text, Facts)
    except ValueError as error:
        raise ValueError(f"{file.path} has an invalid header: {error}; calibrate again") from None
    if set(tensors) != {"weight", "quantiles"}:
        raise ValueError(f"{file.path} holds no weights and quantiles; calibrate again")
    gate = GateWeights(facts, tensors["weight"], tensors["quantiles"])
    _check(file.path, gate)
    return gate


def _check(path: Path, gate: GateWeights) -> None:
    facts, weight, quantiles = gate.facts, gate.weight, gate.quantiles
    right = (facts.layers, facts.heads, width(facts.key_dim, facts.value_dim))
    if weight.dtype != torch.float32 or tuple(weight.shape) != right:
        raise ValueError(
            f"{path}: the weights should be float32 of {right}, and are {weight.dtype} of "
            f"{tuple(weight.shape)}; calibrate again"
        )
    if not (weight.isfinite().all() and quantiles.isfinite().all()):
        raise ValueError(f"{path}: a weight is infinite or NaN; calibrate again")
    if quantiles.ndim != 1 or len(quantiles) < 2 or bool((quantiles.diff() < 0).any()):
        raise ValueError(f"{path}: the quantiles are not ascending; calibrate again")
