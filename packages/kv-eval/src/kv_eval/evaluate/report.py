"""Results of an evaluation, as rows and as a JSON file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Final

import msgspec

from kv_eval.evaluate.divergence import tail
from kv_eval.evaluate.harness_tasks import PREFIX, Harness
from kv_eval.evaluate.intervals import Interval, of_change, of_mean
from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.evaluate.plan import Plan
from kv_policy import Spectral, parse
from kv_policy.files import write_whole
from kv_runtime import Serving
from kv_transformers.from_text import FULL

SOME: Final = msgspec.Meta(min_length=1)
Natural = Annotated[int, msgspec.Meta(ge=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Whole = Annotated[float, msgspec.Meta(gt=0)]  # a divisor of shares
Amounts = Annotated[tuple[Amount, ...], SOME]
Layers = Annotated[tuple[Amounts, ...], SOME]  # an amount per layer and KV head
Spectra = Annotated[tuple[Annotated[tuple[Amounts, ...], SOME], ...], SOME]  # several of them


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One policy on one task: means over the samples, and their total seconds.

    Intervals are 95 % confidence intervals, see `kv_eval.evaluate.intervals`; a single score has
    none.
    """

    policy: str
    task: str
    setting: str
    length: Natural
    samples: Natural  # of all seeds
    seed: int  # the first of them
    seeds: Natural = 1
    score: float  # share of correct answers or of equal tokens; for nll nats per token
    full_score: float
    score_interval: Interval | None = None
    change_interval: Interval | None = None  # of score - full_score, sample by sample
    divergence: Amount | None = None  # of nll, from the full cache: mean over tokens
    divergence_interval: Interval | None = None
    divergence_tail: Amount | None = None  # its 99.9 % quantile over the scored tokens
    kept_share: Amount | None = None  # tokens kept per KV head, of those read; None: not counted
    kv_bytes: Amount  # cache bytes after the prompt
    full_bytes: Whole
    seconds: Amount  # 0: not measured


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON file of an evaluation.

    Fields equal to their default are omitted from the file, and files written before a field
    existed remain readable.

    Attributes:
        model: the name used to load it.
        commit: of the code, see `kv_eval.evaluate.provenance.commit`.
        versions: of Python and of the packages that a result may depend on.
        settings: everything the samples depend on: the model's fingerprint, dtype and device, the
            text, lengths and seeds, see `kv_eval.evaluate.plan.Plan.identity`.
        machine: where it was measured, see `kv_eval.evaluate.machine.machine`.
        attention: backend of the compressed caches.
        rows: one for each task, setting and policy.
        kept: tokens in a policy's cache after the prompt, mean over the samples: for each layer,
            for each of its KV heads. Layers may differ in heads.
        spectra: singular values that determine the ranks of bases, for each layer, for each stored
            head, in descending order; by name.
    """

    model: str
    commit: str
    versions: Mapping[str, str]
    settings: Mapping[str, str | int] = {}  # msgspec copies it for each report
    machine: Mapping[str, str | int | float] = {}
    attention: Serving | None = None
    rows: tuple[Row, ...]
    kept: Mapping[str, Layers] = {}
    spectra: Mapping[str, Spectra] = {}

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def rows(plan: Plan, journal: Journal) -> tuple[Row, ...]:
    """Summarize a journal that has every sample of the plan, in the plan's order.

    After the tasks come the means over the tasks of each group that is there.
    """
    found: list[tuple[Sequence[Finished], Sequence[Finished]]] = []
    for pair in plan.pairs:
        full = _samples(plan, journal, FULL, *pair)
        found += [(_samples(plan, journal, spec, *pair), full) for spec in plan.policies]
    for group, tasks in plan.groups:
        for setting in plan.settings_of(tasks[0]):
            where = (plan, journal, group, tasks, setting)
            found += [
                (over_tasks(spec, *where), over_tasks(FULL, *where)) for spec in plan.policies
            ]
    return tuple(row_of(mine, full, plan.length, plan.seed, plan.seeds) for mine, full in found)


def over_tasks(
    policy: str, plan: Plan, journal: Journal, group: str, tasks: Sequence[str], setting: str
) -> list[Finished]:
    """Return the means over tasks of their first samples, of their second, and so on.

    Samples are independent between tasks, so these means are, and have a confidence interval.
    """
    columns = [_samples(plan, journal, policy, task, setting) for task in tasks]
    return [_mean(group, place, each) for place, each in enumerate(zip(*columns, strict=True))]


def _mean(group: str, place: int, samples: Sequence[Finished]) -> Finished:
    first = samples[0]
    return Finished(
        policy=first.policy,
        task=group,
        setting=first.setting,
        sample=place,
        score=fmean(each.score for each in samples),
        kv_bytes=round(fmean(each.kv_bytes for each in samples)),
        full_bytes=round(fmean(each.full_bytes for each in samples)),
        seconds=sum(each.seconds for each in samples),
        kept_share=_kept_share(samples),
    )


def _kept_share(samples: Sequence[Finished]) -> float | None:
    shares = [each.kept_share for each in samples if each.kept_share is not None]
    return fmean(shares) if len(shares) == len(samples) else None


def harness_rows(harness: Harness, policies: Sequence[str], journal: Journal) -> tuple[Row, ...]:
    """Summarize a journal of lm-eval tasks: a row for each metric and policy."""
    found = []
    for task in harness.tasks:
        full = journal.of(FULL, f"{PREFIX}{task}:")
        for name in dict.fromkeys(entry.task for entry in full):
            before = [entry for entry in full if entry.task == name]
            for spec in policies:
                mine = [entry for entry in journal.of(spec, name) if entry.task == name]
                found.append(row_of(mine, before, before[0].length, harness.seed, 1))
    return tuple(found)


def kept(plan: Plan, journal: Journal) -> dict[str, Layers]:
    """Return the tokens in each policy's cache after a prompt, mean over all samples.

    Policies without counts are omitted.
    """
    found = {}
    for spec in plan.policies:
        entries = [entry for pair in plan.pairs for entry in _samples(plan, journal, spec, *pair)]
        each = [entry.kept for entry in entries if entry.kept]
        if each:
            found[spec] = tuple(
                tuple(fmean(heads) for heads in zip(*layer, strict=True))
                for layer in zip(*each, strict=True)
            )
    return found


def spectra(policies: Sequence[str]) -> dict[str, Spectra]:
    """Return the singular values of the policies' bases, to five digits; shared bases once.

    Raises:
        ValueError: a policy is refused, or its file is damaged.
    """
    found: dict[str, Spectra] = {}
    for spec in policies:
        basis: object = None if spec == FULL else parse(spec).basis
        if isinstance(basis, Spectral):
            for name, singular in basis.singular_values().items():
                found[name] = tuple(tuple(map(_short, layer)) for layer in singular.tolist())
    return found


def _short(values: Sequence[float]) -> Amounts:
    return tuple(float(f"{value:.5g}") for value in values)


def _samples(plan: Plan, journal: Journal, spec: str, task: str, setting: str) -> list[Finished]:
    found = [journal.get(spec, task, setting, i) for i in range(plan.each)]
    return [entry for entry in found if entry is not None]


def row_of(
    samples: Sequence[Finished], full: Sequence[Finished], length: int, seed: int, seeds: int = 1
) -> Row:
    """Summarize the samples of a policy, and the same with the full cache, in the same order."""
    first = samples[0]
    scores, before = [s.score for s in samples], [s.score for s in full]
    apart = [s.divergences for s in samples if s.divergences]
    means = [fmean(each) for each in apart] if len(apart) == len(samples) else []
    return Row(
        policy=first.policy,
        task=first.task,
        setting=first.setting,
        length=length,
        samples=len(samples),
        seed=seed,
        seeds=seeds,
        score=fmean(scores),
        full_score=fmean(before),
        score_interval=of_mean(scores),
        change_interval=None if first.policy == FULL else of_change(scores, before),
        divergence=fmean(means) if means else None,
        divergence_interval=of_mean(means) if means else None,
        divergence_tail=tail([value for each in apart for value in each]) if means else None,
        kept_share=_kept_share(samples),
        kv_bytes=fmean(s.kv_bytes for s in samples),
        full_bytes=fmean(s.full_bytes for s in samples),
        seconds=sum(s.seconds for s in samples),
    )
