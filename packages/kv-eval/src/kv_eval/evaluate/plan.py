"""What an evaluation asks: which tasks, in which settings, of which samples."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from kv_eval.evaluate.provenance import subject
from kv_eval.tasks import (
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
    variable_tracking,
)

if TYPE_CHECKING:
    from kv_transformers.models import LoadedModel

TASKS: Final[tuple[TaskName, ...]] = get_args(TaskName)
SETTINGS: Final[tuple[Setting, ...]] = get_args(Setting)
WITHOUT_QUESTION: Final = frozenset({"nll", "agreement"})


@dataclass(frozen=True, slots=True)
class Plan:
    """Every figure that the samples of an evaluation follow from."""

    policies: tuple[str, ...]  # canonical, `full` first
    tasks: tuple[TaskName, ...]
    settings: tuple[Setting, ...]
    length: int = 2000  # tokens of the prompt
    samples: int = 10  # of each seed
    seed: int = 0  # the first one
    seeds: int = 1
    batch: int = 4  # samples that run together in tasks where all are equally long
    continuation: int = 256  # tokens scored by nll
    split: bool = True  # whether a question may come after a prompt that has been compressed

    def __post_init__(self) -> None:
        """Check the counts, and that every task has a setting to run in.

        Raises:
            ValueError: with a sentence, where one is out of range or a task would not run at all.
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
                    "`aware`; ask for `agnostic` or `both`"
                )
            raise ValueError(
                f"{task} can only be asked with its question inside the prompt here, as prompts "
                "are read to their end before they are compressed; ask for `aware` or `both`"
            )

    @property
    def pairs(self) -> tuple[tuple[TaskName, Setting], ...]:
        """Tasks with the settings they run in, in order."""
        return tuple((task, setting) for task in self.tasks for setting in self.settings_of(task))

    @property
    def each(self) -> int:
        """Samples of a task in a setting, those of all seeds together."""
        return self.samples * self.seeds

    def settings_of(self, task: TaskName) -> tuple[Setting, ...]:
        """The settings asked for that a task has; one without a question is always agnostic."""
        if task in WITHOUT_QUESTION:
            return tuple(s for s in self.settings if s == "agnostic")
        return tuple(s for s in self.settings if self.split or s == "aware")

    def batch_of(self, task: TaskName) -> int:
        """Samples that run together: where prompts differ in length, one at a time."""
        return self.batch if task in WITHOUT_QUESTION else 1

    def made(self, loaded: "LoadedModel", text: Text) -> tuple[tuple[Sample, ...], ...]:
        """Make the samples of every pair of task and setting.

        Raises:
            TaskError: one cannot be made, or takes more tokens than the model reads.
        """
        work = tuple(self.samples_of(loaded, text, *pair) for pair in self.pairs)
        for samples in work:
            _expect_readable(loaded, samples)
        return work

    def samples_of(
        self, loaded: "LoadedModel", text: Text, task: TaskName, setting: Setting
    ) -> tuple[Sample, ...]:
        """Make the samples of a task, those of one seed after those of another.

        Equal plans, texts and tokenizers give equal ones.

        Raises:
            TaskError: the length does not fit the wording, the text or the model.
        """
        seeds = range(self.seed, self.seed + self.seeds)
        return tuple(
            sample for seed in seeds for sample in self._seeded(loaded, text, task, setting, seed)
        )

    def identity(self, loaded: "LoadedModel", text: Text) -> dict[str, str | int]:
        """Everything but policies, tasks and settings that a sample's result depends on."""
        return {
            **subject(loaded, text),
            "length": self.length,
            "samples": self.samples,
            "seed": self.seed,
            "seeds": self.seeds,
            "batch": self.batch,
            "continuation": self.continuation,
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


def _expect_readable(loaded: "LoadedModel", samples: tuple[Sample, ...]) -> None:
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    longest = max(s.length + len(s.target_ids) + s.new_tokens for s in samples)
    if limit is not None and longest > limit:
        raise TaskError(
            f"{samples[0].task} at this length takes up to {longest:,} tokens with what comes "
            f"after the prompt; the model {loaded.name} reads {limit:,}, so ask for fewer"
        )
