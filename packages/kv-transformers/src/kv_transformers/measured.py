"""Figures of policies that were measured, as shipped in `measured.json`.

The file is written by `python -m tools.measured` from the results of benchmarks.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, Literal

import msgspec

FILE: Final = "measured.json"
Interval = tuple[float, float]


class Found(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hidden numbers that a model found.

    Attributes:
        task: `needle` or `multikey`, see `kv_eval.tasks`.
        setting: `aware` if the question was in the compressed prompt, `agnostic` if it came later.
        samples: numbers that were asked for.
        found: how many of them were found.
        full_found: how many with the full cache.
        change: 95 % interval of the change in their share, by Agresti and Min (2005).
    """

    task: str
    setting: Literal["aware", "agnostic"]
    samples: int
    found: int
    full_found: int
    change: Interval

    @property
    def lost(self) -> bool:
        """Whether the interval shows that numbers were lost."""
        return self.change[1] < 0


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy in one result.

    Attributes:
        policy: its canonical text form.
        result: name of the result.
        length: tokens of a prompt.
        windows: texts that were read.
        loss: nats per token over the full cache's, mean over the windows.
        interval: 95 % interval of that mean, by the bootstrap of paired differences.
        numbers: hidden numbers, where they were asked for.
    """

    policy: str
    result: str
    length: int
    windows: int
    loss: float
    interval: Interval
    numbers: tuple[Found, ...] = ()


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that was measured.

    Attributes:
        model: on which model.
        fingerprint: that of the model's weights.
        commits: of the code that was measured, by result.
        figures: one for each policy and result.
    """

    model: str
    fingerprint: str
    commits: Mapping[str, str]
    figures: tuple[Figure, ...]

    def of(self, policy: str) -> tuple[Figure, ...]:
        """Return the figures of a policy, in the order of results."""
        return tuple(figure for figure in self.figures if figure.policy == policy)

    @property
    def policies(self) -> tuple[str, ...]:
        """Every policy that was measured."""
        return tuple(dict.fromkeys(figure.policy for figure in self.figures))


@cache
def measured() -> Measured:
    """Read the shipped file."""
    data = files("kv_transformers").joinpath(FILE).read_bytes()
    return msgspec.json.decode(data, type=Measured)
