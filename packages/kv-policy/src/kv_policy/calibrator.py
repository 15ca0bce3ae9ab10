"""What a package offers that learns from a model's own vectors; a host shows it them."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy.registry import BrokenPolicyError, claims, imported, package_of
from kv_policy.shape import CacheShape

CALIBRATION: Final = "kv_calibration"  # the entry point group of what starts a calibrator


class NotCalibratedError(ValueError):
    """A policy names a file that is not there, and that calibration of the model writes.

    Attributes:
        policy: name of the policy.
        path: the file.
        calibration: what `kv-serve calibrate` is told to run.
    """

    def __init__(self, policy: str, path: str, calibration: str) -> None:
        """Say which file is missing, of which policy."""
        super().__init__(policy, path, calibration)  # as pickle makes it again
        self.policy, self.path, self.calibration = policy, path, calibration

    def __str__(self) -> str:
        """Say what writes the file, for a model that is not known."""
        return self.advice("MODEL")

    def advice(self, model: str | None) -> str:
        """Say what writes the file, for this model; None: the default model of `kv-serve`."""
        command = calibrate_command(self.calibration, self.path, model)
        return f"{self.policy}: {self.path} does not exist; write it with `{command}`"


def calibrate_command(calibration: str, path: str, model: str | None = "MODEL") -> str:
    """Give the command that calibrates a model and writes what it finds to a file."""
    named = [] if model is None else ["--model", model]
    return shlex.join(["kv-serve", "calibrate", calibration, *named, "--out", path])


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Which model read which text, and what a search found then, for the file's readers."""

    model: str  # its name, for people
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the text
    digest: str  # of the text
    rate: float | None = None  # the greatest that lost no more than was allowed
    max_loss: float | None = None  # the loss that was allowed
    tasks: tuple[str, ...] = ()  # those it was allowed on


@runtime_checkable
class Calibrator(Protocol):
    """Takes in the queries, keys and values of a model, and writes what it learnt to a file.

    What it holds does not grow with the tokens it sees.
    """

    @property
    def tokens(self) -> int:
        """Tokens that every layer has seen."""
        ...

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Take in a layer's vectors of some tokens, after RoPE; `there` leaves out padding."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything it knows, to go on from."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same model, as if it had seen the tokens itself."""
        ...

    def dimensions(self, removal: float) -> Mapping[str, float]:
        """The median dimensions per head that a removal rate leaves, by what is stored."""
        ...

    def rates(self, count: int) -> tuple[float, ...]:
        """Shares of the cache that its policy can remove, rising; at most `count`."""
        ...

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write what it learnt, whole or not at all."""
        ...


@runtime_checkable
class StartsCalibrator(Protocol):
    """What a package registers in the entry point group `kv_calibration`."""

    def __call__(
        self,
        shape: CacheShape,
        output: Iterable[Float[Tensor, "hidden QD"]],
        together: int = 1,
    ) -> Calibrator:
        """Start a calibrator that has seen nothing yet.

        Args:
            shape: the model's cache.
            output: weights of the output projections, layer by layer.
            together: KV heads whose vectors are looked at side by side.
        """
        ...


def load_calibrator(name: str) -> StartsCalibrator:
    """Import what starts the calibrator of that name.

    Raises:
        ValueError: nothing of that name is installed.
        BrokenPolicyError: two packages claim it, or its package cannot be imported.
    """
    found = claims(CALIBRATION)
    if name not in found:
        names = ", ".join(found) or "none"
        raise ValueError(f"nothing is called {name!r}; what can be calibrated: {names}")
    start = imported(f"the calibration {name!r}", found[name])
    if not isinstance(start, StartsCalibrator):
        raise BrokenPolicyError(
            f"the calibration {name!r} of {package_of(found[name][0])} cannot be used: "
            f"{found[name][0].value} cannot be called; register what starts a kv_policy.Calibrator"
        )
    return start
