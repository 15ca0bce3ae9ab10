"""The plan of an evaluation: tasks, settings and samples."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, get_args

from kv_eval.evaluate.provenance import subject
from kv_eval.tasks import (
    RULER,
    Sample,
    Setting,
    TaskError,
    TaskName,
    Text,
    agreement,
    common_words,
    multikey,
    needle,
    nll,
    passkey,
    ruler_samples,
    variable_tracking,
)

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

TASKS: Final[tuple[TaskName, ...]] = get_args(TaskName)
SETTINGS: Final[tuple[Setting, ...]] = get_args(Setting)
WITHOUT_QUESTION: Final = frozenset({"nll", "agreement"})
GROUPS: Final[Mapping[str, tuple[TaskName, ...]]] = {"ruler": RULER}


def expand_tasks(names: Iterable[str]) -> tuple[TaskName, ...]:
    """Return the tasks that names of tasks and groups stand for, each once.

    >>> expand_tasks(["nll", "ruler"])[:3]
    ('nll', 'niah_single_1', 'niah_single_2')

    Raises:
        ValueError: a name is of no task and no group.
    """
    known: dict[str, tuple[TaskName, ...]] = {**{task: (task,) for task in TASKS}, **GROUPS}
    named = list(names)
    if unknown := next((name for name in named if name not in known), None):
        raise ValueError(f"unknown task {unknown!r}; tasks and groups of them: {', '.join(known)}")
    return tuple(dict.fromkeys(task for name in named for task in known[name]))


@dataclass(frozen=True, slots=True)
class Plan:
    """All parameters that determine the samples of an evaluation."""

    policies: tuple[str, ...]  # canonical, `full` first
    tasks: tuple[TaskName, ...]
    settings: tuple[Setting, ...]
    length: int = 2000  # tokens per prompt
    samples: int = 10  # per seed
    seed: int = 0  # the first one
    seeds: int = 1
    batch: int = 4  # samples that run together in tasks whose prompts have equal lengths
    continuation: int = 256  # tokens scored by nll
    answer: int | None = None  # maximum tokens of an answer of RULER; None: as in RULER
    split: bool = True  # whether a question may follow a compressed prompt

    def __post_init__(self) -> None:
        """Check the counts, and that every task has a setting.

        Raises:
            ValueError: a value is out of range, or a task would not run at all.
        """
        for name in ("length", "samples", "seeds", "batch", "continuation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for task in self.tasks:
            if self.settings_of(task):
                continue
            if task in WITHOUT_QUESTION:
                raise ValueError(
                    f"{task} has no question that could be inside the prompt, so it has no setting "
                    "`aware`; use `agnostic` or `both`"
                )
            raise ValueError(
                f"{task} needs its question inside the prompt here, as prompts are read to their "
                "end before they are compressed; use `aware` or `both`"
            )

    @property
    def pairs(self) -> tuple[tuple[TaskName, Setting], ...]:
        """Tasks with their settings, in order."""
        return tuple((task, setting) for task in self.tasks for setting in self.settings_of(task))

    @property
    def groups(self) -> tuple[tuple[str, tuple[TaskName, ...]], ...]:
        """The groups all of whose tasks are in the plan, with their tasks."""
        return tuple((name, tasks) for name, tasks in GROUPS.items() if {*tasks} <= {*self.tasks})

    @property
    def each(self) -> int:
        """Samples per task and setting, over all seeds."""
        return self.samples * self.seeds

    def settings_of(self, task: TaskName) -> tuple[Setting, ...]:
        """Return the requested settings of a task; one without a question is always agnostic."""
        if task in WITHOUT_QUESTION:
            return tuple(s for s in self.settings if s == "agnostic")
        return tuple(s for s in self.settings if self.split or s == "aware")

    def batch_of(self, task: TaskName) -> int:
        """Return the batch size: 1 for tasks with prompts of different lengths."""
        return self.batch if task in WITHOUT_QUESTION or task in RULER else 1

    def made(self, loaded: "LoadedModel", text: Text) -> tuple[tuple[Sample, ...], ...]:
        """Create the samples of every pair of task and setting.

        Raises:
            TaskError: a sample cannot be created, or exceeds the model's context length.
        """
        work = tuple(self.samples_of(loaded, text, *pair) for pair in self.pairs)
        for samples in work:
            _expect_readable(loaded, samples)
        return work

    def samples_of(
        self, loaded: "LoadedModel", text: Text, task: TaskName, setting: Setting
    ) -> tuple[Sample, ...]:
        """Create the samples of a task, seed by seed.

        Equal plans, texts and tokenizers give equal samples.

        Raises:
            TaskError: the length does not fit the wording, the text or the model.
        """
        seeds = range(self.seed, self.seed + self.seeds)
        return tuple(
            sample for seed in seeds for sample in self._seeded(loaded, text, task, setting, seed)
        )

    def identity(self, loaded: "LoadedModel", text: Text) -> dict[str, str | int]:
        """Return everything but policies, tasks and settings that a sample's result depends on."""
        return {
            **subject(loaded, text),
            "length": self.length,
            "samples": self.samples,
            "seed": self.seed,
            "seeds": self.seeds,
            "batch": self.batch,
            "continuation": self.continuation,
            **({} if self.answer is None else {"answer": self.answer}),
        }

    def _seeded(
        self, loaded: "LoadedModel", text: Text, task: TaskName, setting: Setting, seed: int
    ) -> tuple[Sample, ...]:
        tokenizer = loaded.tokenizer
        size = {"length": self.length, "samples": self.samples, "seed": seed}
        match task:
            case "needle":
                return needle(tokenizer, text, setting=setting, **size)
            case "multikey":
                return multikey(tokenizer, text, setting=setting, **size)
            case "passkey":
                return passkey(tokenizer, setting=setting, **size)
            case "variable-tracking":
                return variable_tracking(tokenizer, text, setting=setting, **size)
            case "common-words":
                return common_words(tokenizer, text, setting=setting, **size)
            case "nll":
                return nll(tokenizer, text, continuation=self.continuation, **size)
            case "agreement":
                return agreement(tokenizer, text, **size)
            case _:
                samples = ruler_samples(task, tokenizer, text, setting=setting, **size)
                most = self.answer
                return samples if most is None else tuple(_ending(each, most) for each in samples)


def _ending(sample: Sample, most: int) -> Sample:
    return replace(sample, new_tokens=min(most, sample.new_tokens))


def _expect_readable(loaded: "LoadedModel", samples: tuple[Sample, ...]) -> None:
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    longest = max(s.length + len(s.target_ids) + s.new_tokens for s in samples)
    if limit is not None and longest > limit:
        raise TaskError(
            f"{samples[0].task} at this length takes up to {longest:,} tokens with its "
            f"continuation; the model {loaded.name} reads {limit:,}, so use a smaller length"
        )
