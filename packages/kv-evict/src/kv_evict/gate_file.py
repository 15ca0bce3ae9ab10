"""The file of a gate: a network for every KV head of a model."""

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

from kv_evict.gate_features import scalars, width
from kv_evict.gate_kernels import kernels_of
from kv_evict.gate_network import GateNetwork
from kv_policy import CacheShape, LayerView, NotCalibratedError
from kv_policy.decoding import decode
from kv_policy.tensor_files import Stamp, read, stamp, write

FORMAT: Final = "kv-evict gate 2"
CALIBRATION: Final = "gate"
_SUFFIX: Final = ".safetensors"
_TOGETHER: Final = 4096  # tokens whose features are in memory at once

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
    units: Annotated[int, Meta(ge=0)]  # of the hidden layer
    overlap: Mapping[str, float]  # with the target's choice on other text, by kept share


@dataclass(frozen=True, eq=False)
class GateWeights:
    """A gate in memory; two are equal only if they are the same."""

    facts: Facts
    network: GateNetwork  # N x H networks; linear in float32, the rest in float16
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
        self._expect(view.shape)
        network = self.on(view.keys.device)
        kernels = kernels_of(view, network, self.logarithm)
        if kernels is None:
            found = self.logarithm(view)
        else:
            found = kernels.gate(view, network.linear, network.inner, network.outer)
        return found.clamp(max=0).exp()  # a probability

    def logarithm(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the logarithm of the score of each token in view, computed by torch.

        Any other code that computes scores is tested against it.
        """
        assert view.keys is not None
        heads = slice(view.shape.first_head, view.shape.first_head + view.keys.shape[1])
        network = self.on(view.keys.device).rows(view.layer, heads)
        starts = range(0, max(1, view.keys.shape[2]), _TOGETHER)
        return torch.cat([self._some(network, view, slice(i, i + _TOGETHER)) for i in starts], -1)

    def _some(self, network: GateNetwork, view: LayerView, some: slice) -> Float[Tensor, "B H T"]:
        """Return the logarithm of the scores of some tokens, with their keys rotated back."""
        assert view.keys is not None
        assert view.values is not None
        key, value = view.keys[:, :, some].float(), view.values[:, :, some].float()
        # Heads of a prompt have the same positions, so their angles are computed once.
        place = view.position if view.position.stride(1) else view.position[:, :1]
        back = -place[:, :, some].clamp(min=0)
        plain = view.shape.turned(key, back, view.layer)
        pairs = view.shape.pair_norms(key, view.layer)
        return network.of((plain.mT, value.mT, pairs.mT, scalars(plain, value)))

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

    def on(self, device: torch.device) -> GateNetwork:
        """Return the networks on a device, in float32; cached."""
        return _placed(self, device)


def save(path: Path, gate: GateWeights) -> None:
    """Write a gate atomically.

    Raises:
        ValueError: the sizes in the facts differ from those of the weights, or a number is not
            finite.
        OSError: writing failed; an existing file is unchanged.
    """
    _check(path, gate)
    network = gate.network
    tensors = {
        "linear": network.linear,
        "inner": network.inner,
        "outer": network.outer,
        "quantiles": gate.quantiles,
    }
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
def _placed(gate: GateWeights, device: torch.device) -> GateNetwork:
    with torch.inference_mode(False):  # cached tensors outlive the caller
        return gate.network.to(device)


@lru_cache(maxsize=8)
def _load(file: Stamp) -> GateWeights:
    text, tensors = read(file.path, FORMAT, CALIBRATION)
    try:
        facts = decode(text, Facts)
    except ValueError as error:
        raise ValueError(f"{file.path} has an invalid header: {error}; calibrate again") from None
    if set(tensors) != {"linear", "inner", "outer", "quantiles"}:
        raise ValueError(f"{file.path} holds no network and quantiles; calibrate again")
    network = GateNetwork(tensors["linear"], tensors["inner"], tensors["outer"])
    gate = GateWeights(facts, network, tensors["quantiles"])
    _check(file.path, gate)
    return gate


def _check(path: Path, gate: GateWeights) -> None:
    facts, network, quantiles = gate.facts, gate.network, gate.quantiles
    heads = (facts.layers, facts.heads)
    count, units = width(facts.key_dim, facts.value_dim), facts.units
    for name, tensor, dtype, sizes in (
        ("linear", network.linear, torch.float32, (*heads, count)),
        ("inner", network.inner, torch.float16, (*heads, count, units)),
        ("outer", network.outer, torch.float16, (*heads, units)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != sizes:
            raise ValueError(
                f"{path}: the tensor {name} should be {dtype} of {sizes}, and is {tensor.dtype} of "
                f"{tuple(tensor.shape)}; calibrate again"
            )
        if not tensor.isfinite().all():
            raise ValueError(f"{path}: a weight is infinite or NaN; calibrate again")
    if not quantiles.isfinite().all() or quantiles.ndim != 1 or len(quantiles) < 2:
        raise ValueError(f"{path}: the quantiles are no list of finite numbers; calibrate again")
    if bool((quantiles.diff() < 0).any()):
        raise ValueError(f"{path}: the quantiles are not ascending; calibrate again")
