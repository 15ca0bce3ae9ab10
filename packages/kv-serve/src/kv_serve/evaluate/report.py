"""What an evaluation found, as rows and as a JSON file."""

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import msgspec

from kv_serve.backends import Serving
from kv_serve.evaluate.journal import Finished, Journal
from kv_serve.evaluate.plan import Plan
from kv_serve.evaluate.specs import FULL


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one task: means over the samples, and the seconds all of them took."""

    policy: str
    task: str
    setting: str
    length: int
    samples: int
    seed: int
    score: float  # share of right answers or of equal tokens; for nll nats per token
    full_score: float
    kv_bytes: float  # held after the prompt
    full_bytes: float
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON file of an evaluation."""

    model: str
    commit: str
    versions: Mapping[str, str]
    attention: Serving  # what attended over compressed caches
    rows: tuple[Row, ...]

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        fresh = path.with_name(path.name + ".new")
        data = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)


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
