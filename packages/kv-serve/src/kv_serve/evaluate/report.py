"""What an evaluation found, as rows and as a JSON file."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final

import msgspec

from kv_serve.backends import Serving
from kv_serve.evaluate.journal import Finished, Journal
from kv_serve.evaluate.plan import Plan
from kv_serve.evaluate.specs import FULL
from kv_serve.files import write_whole

SOME: Final = msgspec.Meta(min_length=1)
Natural = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Whole = Annotated[float, msgspec.Meta(gt=0)]  # what others are shares of
Amounts = Annotated[tuple[Amount, ...], SOME]
Layers = Annotated[tuple[Amounts, ...], SOME]  # per layer and KV head an amount
Spectra = Annotated[tuple[Annotated[tuple[Amounts, ...], SOME], ...], SOME]  # and here several


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one task: means over the samples, and the seconds all of them took."""

    policy: str
    task: str
    setting: str
    length: Natural
    samples: Natural
    seed: int
    score: float  # share of right answers or of equal tokens; for nll nats per token
    full_score: float
    kv_bytes: Amount  # held after the prompt
    full_bytes: Whole
    seconds: Amount  # 0: nobody measured them


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON file of an evaluation.

    Fields with a default are left out of the file where nothing else is known, and files that were
    written before there was such a field can be read.

    Attributes:
        model: the name that it was asked for by.
        commit: what `kv_serve.evaluate.provenance.commit` says of the code.
        versions: of Python and of the packages that a result may depend on.
        attention: what attended over compressed caches.
        rows: one for each task, setting and policy.
        kept: tokens that a policy's cache holds after the prompt, mean over the samples: for each
            layer, for each of its KV heads. Layers may differ in heads.
        spectra: singular values of what a model caches, for each layer, for each of its KV heads,
            the greatest first; by what they are of, such as `keys` and `values`.
    """

    model: str
    commit: str
    versions: Mapping[str, str]
    attention: Serving | None = None
    rows: tuple[Row, ...]
    kept: Mapping[str, Layers] = {}  # msgspec gives every report a fresh one
    spectra: Mapping[str, Spectra] = {}

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def rows(plan: Plan, journal: Journal) -> tuple[Row, ...]:
    """Sum up a journal that has every sample of the plan, in the plan's order."""
    return tuple(
        _row(plan, _samples(plan, journal, spec, *pair), _samples(plan, journal, FULL, *pair))
        for pair in plan.pairs
        for spec in plan.policies
    )


def _samples(plan: Plan, journal: Journal, spec: str, task: str, setting: str) -> list[Finished]:
    found = [journal.get(spec, task, setting, i) for i in range(plan.samples)]
    return [entry for entry in found if entry is not None]


def _row(plan: Plan, samples: list[Finished], full: list[Finished]) -> Row:
    first = samples[0]
    return Row(
        policy=first.policy,
        task=first.task,
        setting=first.setting,
        length=plan.length,
        samples=len(samples),
        seed=plan.seed,
        score=fmean(s.score for s in samples),
        full_score=fmean(s.score for s in full),
        kv_bytes=fmean(s.kv_bytes for s in samples),
        full_bytes=fmean(s.full_bytes for s in samples),
        seconds=sum(s.seconds for s in samples),
    )
