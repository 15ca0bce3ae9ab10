"""Calibration: packages register calibrators, a host feeds them a model's own vectors."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from kv_policy.registry import BrokenPolicyError, claims, imported, package_of
from kv_policy.shape import CacheShape

CALIBRATION: Final = "kv_calibration"  # entry point group of calibrator factories
SCORE_CALIBRATION: Final = "kv_score_calibration"  # entry point group of score calibrators
HEAD_CALIBRATION: Final = "kv_head_calibration"  # entry point group of head calibrators
LEVEL_CALIBRATION: Final = "kv_level_calibration"  # entry point group of level calibrators


class NotCalibratedError(ValueError):
    """A policy needs a calibration file that does not exist.

    Attributes:
        policy: name of the policy.
        path: the file.
        calibration: the method argument of `kv-serve calibrate`.
    """

    def __init__(self, policy: str, path: str, calibration: str) -> None:
        """Store the policy, the missing file and the calibration."""
        super().__init__(policy, path, calibration)  # pickle calls this with args
        self.policy, self.path, self.calibration = policy, path, calibration

    def __str__(self) -> str:
        """Return the message with the placeholder MODEL."""
        return self.advice("MODEL")

    def advice(self, model: str | None) -> str:
        """Return the message for this model; None: the default model of `kv-serve`."""
        command = calibrate_command(self.calibration, self.path, model)
        return f"{self.policy}: {self.path} does not exist; write it with `{command}`"


def calibrate_command(calibration: str, path: str, model: str | None = "MODEL") -> str:
    """Return the command that calibrates a model and writes the result to a file."""
    named = [] if model is None else ["--model", model]
    return shlex.join(["kv-serve", "calibrate", calibration, *named, "--out", path])


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Provenance of a calibration: the model, the text and the result of the rate search."""

    model: str  # display name
    fingerprint: str  # of its weights, settings and tokenizer
    text: str  # name of the text
    digest: str  # of the text
    rate: float | None = None  # highest rate within the allowed loss
    max_loss: float | None = None  # the allowed loss
    tasks: tuple[str, ...] = ()  # the tasks the loss was measured on


@dataclass(frozen=True, slots=True)
class LevelError:
    """Estimated relative errors of attention outputs, if keys or values alone are stored in codes.

    Attributes:
        bits: of a code.
        outliers: elements of a vector that are kept apart.
        keys: by the fitted levels.
        values: by the fitted levels.
        even_keys: by even steps of as many bits.
        even_values: by even steps of as many bits.
    """

    bits: int
    outliers: int
    keys: float
    values: float
    even_keys: float
    even_values: float


@runtime_checkable
class Collector(Protocol):
    """Receives a model's queries, keys and values."""

    def see(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        there: Bool[Tensor, "B L"] | None = None,
    ) -> None:
        """Receive a layer's vectors, after RoPE; `there` is False for padding.

        Queries are scaled so that q·k / sqrt(D) is the logit, for any attention scale of the model.
        """
        ...


@runtime_checkable
class Resumable(Collector, Protocol):
    """Accumulates what it receives; its memory does not grow with the number of tokens."""

    @property
    def tokens(self) -> int:
        """Tokens accumulated in every layer."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return the complete state, for `restore`."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state of the same model, as if it had accumulated the tokens itself."""
        ...


@runtime_checkable
class Calibrator(Resumable, Protocol):
    """Fits a basis to what it accumulates, and writes it to a file."""

    def dimensions(self, removal: float) -> Mapping[str, float]:
        """Return the median dimensions per head at a removal rate, by stored vector."""
        ...

    def rates(self, count: int) -> tuple[float, ...]:
        """Return the removable shares of the cache in ascending order, at most `count`."""
        ...

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the fitted result atomically."""
        ...


@runtime_checkable
class StartsCalibrator(Protocol):
    """The factory that a package registers in the entry point group `kv_calibration`."""

    def __call__(
        self,
        shape: CacheShape,
        output: Iterable[Float[Tensor, "hidden QD"]],
        together: int = 1,
    ) -> Calibrator:
        """Return an empty calibrator.

        Args:
            shape: the model's cache.
            output: weights of the output projections, layer by layer.
            together: KV heads whose vectors are concatenated.
        """
        ...


@runtime_checkable
class ScoreEvaluation(Collector, Protocol):
    """Compares predicted scores of tokens with those they were fitted to, on other texts."""

    def overlap(self, share: float, layers: slice = slice(None)) -> float:
        """Return the mean share of the target's best tokens that are among the predicted best.

        All heads of the layers compete for the kept `share` of a pass.
        """
        ...


@runtime_checkable
class ScoreCalibrator(Resumable, Protocol):
    """Fits scores of tokens to the attention they receive while the model repeats a text.

    A pass holds a text, an instruction to repeat it, and the text again.
    """

    def fit(self) -> Iterator[float]:
        """Fit to the passes so far; yield the share that is done, 1 at the end.

        What is not run to its end has no effect, and a pass that follows makes it necessary again.
        """
        ...

    def evaluation(self) -> ScoreEvaluation:
        """Return an empty evaluation of what was fitted.

        Raises:
            ValueError: nothing is fitted to the passes so far.
        """
        ...

    def write(
        self, path: Path, facts: Calibrated, window: int, evaluations: Collection[ScoreEvaluation]
    ) -> None:
        """Write the fitted result atomically.

        Args:
            path: the file.
            facts: the model and the text.
            window: tokens that were repeated at once.
            evaluations: its own evaluations, which were shown texts it was not fitted on.
        """
        ...


@runtime_checkable
class StartsScoreCalibrator(Protocol):
    """The factory that a package registers in the entry point group `kv_score_calibration`."""

    def __call__(self, shape: CacheShape, instruction: int) -> ScoreCalibrator:
        """Return an empty calibrator.

        Args:
            shape: the model's cache, with its rotary embedding.
            instruction: tokens between a text and its repetition.
        """
        ...


@runtime_checkable
class HeadCalibrator(Resumable, Protocol):
    """Scores KV heads on passes of random tokens that repeat with a period."""

    def scores(self) -> Mapping[str, Float[Tensor, "N H"]]:
        """Return the scores of all heads so far, by kind.

        Raises:
            ValueError: no tokens were accumulated.
        """
        ...

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the scores atomically."""
        ...


@runtime_checkable
class StartsHeadCalibrator(Protocol):
    """The factory that a package registers in the entry point group `kv_head_calibration`."""

    def __call__(self, shape: CacheShape, period: int) -> HeadCalibrator:
        """Return an empty calibrator.

        Args:
            shape: the model's cache.
            period: tokens after which a pass repeats; before the first, it may have fewer others.
        """
        ...


@runtime_checkable
class LevelCalibrator(Resumable, Protocol):
    """Fits the levels of codes to keys and values."""

    def errors(self) -> tuple[LevelError, ...]:
        """Return what the fitted levels lose, for each number of outliers and of bits.

        Raises:
            ValueError: no tokens were accumulated.
        """
        ...

    def write(self, path: Path, facts: Calibrated) -> None:
        """Write the levels atomically."""
        ...


@runtime_checkable
class StartsLevelCalibrator(Protocol):
    """The factory that a package registers in the entry point group `kv_level_calibration`."""

    def __call__(self, shape: CacheShape, outliers: tuple[int, ...]) -> LevelCalibrator:
        """Return an empty calibrator.

        Args:
            shape: the model's cache.
            outliers: the numbers of elements of a vector that are kept apart; levels are fitted
                for each.
        """
        ...


def load_calibrator(name: str) -> StartsCalibrator:
    """Import the calibrator factory with this name.

    Raises:
        ValueError: the name is not installed.
        BrokenPolicyError: two packages claim the name, or its package cannot be imported.
    """
    start: StartsCalibrator = _registered(CALIBRATION, name, StartsCalibrator)
    return start


def load_score_calibrator(name: str) -> StartsScoreCalibrator:
    """Import the score calibrator factory with this name.

    Raises:
        ValueError: the name is not installed.
        BrokenPolicyError: two packages claim the name, or its package cannot be imported.
    """
    start: StartsScoreCalibrator = _registered(SCORE_CALIBRATION, name, StartsScoreCalibrator)
    return start


def load_head_calibrator(name: str) -> StartsHeadCalibrator:
    """Import the head calibrator factory with this name.

    Raises:
        ValueError: the name is not installed.
        BrokenPolicyError: two packages claim the name, or its package cannot be imported.
    """
    start: StartsHeadCalibrator = _registered(HEAD_CALIBRATION, name, StartsHeadCalibrator)
    return start


def load_level_calibrator(name: str) -> StartsLevelCalibrator:
    """Import the level calibrator factory with this name.

    Raises:
        ValueError: the name is not installed.
        BrokenPolicyError: two packages claim the name, or its package cannot be imported.
    """
    start: StartsLevelCalibrator = _registered(LEVEL_CALIBRATION, name, StartsLevelCalibrator)
    return start


def _registered(group: str, name: str, kind: type) -> Any:
    """Import an entry point, a factory of this kind that makes such a calibrator.

    Raises:
        ValueError: the name is not installed.
        BrokenPolicyError: two packages claim the name, its package cannot be imported, or it cannot
            be called.
    """
    found = claims(group)
    if name not in found:
        names = ", ".join(found) or "none"
        raise ValueError(f"unknown calibration {name!r}; choose one of: {names}")
    start = imported(f"the calibration {name!r}", found[name])
    owner, value = package_of(found[name][0]), found[name][0].value
    if not isinstance(start, kind):
        raise BrokenPolicyError(
            f"the calibration {name!r} of {owner} cannot be used: {value} is not callable; "
            f"register a factory of a kv_policy.{kind.__name__.removeprefix('Starts')}"
        )
    return start
