"""What an evaluation asks: which tasks, in which settings, of which samples."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, get_args

from kv_serve.evaluate.provenance import subject
from kv_serve.tasks import Sample, Setting, TaskName, Text, agreement, multikey, needle, nll

if TYPE_CHECKING:
    from kv_serve.models import LoadedModel

TASKS: Final[tuple[TaskName, ...]] = get_args(TaskName)
SETTINGS: Final[tuple[Setting, ...]] = get_args(Setting)
_WITHOUT_QUESTION: Final = frozenset({"nll", "agreement"})


@dataclass(frozen=True, slots=True)
class Plan:
    """Every figure that the samples of an evaluation follow from."""

    policies: tuple[str, ...]  # canonical, `full` first
    tasks: tuple[TaskName, ...]
    settings: tuple[Setting, ...]
    length: int = 2000  # tokens of the prompt
    samples: int = 10
    seed: int = 0
    batch: int = 4  # samples that run together in tasks where all are equally long
    continuation: int = 256  # tokens scored by nll

    def __post_init__(self) -> None:
        """Check the counts, and that every task has a setting to run in.

        Raises:
            ValueError: with a sentence, where one is out of range or a task would not run at all.
        """
        for name in ("length", "samples", "batch", "continuation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for task in self.tasks:
            if not self.settings_of(task):
                raise ValueError(
                    f"{task} has no question that could be inside the prompt, so it has no setting "
                    "`aware`; ask for `agnostic` or `both`"
                )

    @property
    def pairs(self) -> tuple[tuple[TaskName, Setting], ...]:
        """Tasks with the settings they run in, in order."""
        return tuple((task, setting) for task in self.tasks for setting in self.settings_of(task))

    def settings_of(self, task: TaskName) -> tuple[Setting, ...]:
        """The settings asked for that a task has; one without a question is always agnostic."""
        if task in _WITHOUT_QUESTION:
            return tuple(s for s in self.settings if s == "agnostic")
        return self.settings

    def batch_of(self, task: TaskName) -> int:
        """Samples that run together: where prompts differ in length, one at a time."""
        return self.batch if task in _WITHOUT_QUESTION else 1

    def samples_of(
        self, loaded: "LoadedModel", text: Text, task: TaskName, setting: Setting
    ) -> tuple[Sample, ...]:
        """Make the samples of a task; equal plans, texts and tokenizers give equal ones.

        Raises:
            TaskError: the length does not fit the wording, the text or the model.
        """
        tokenizer = loaded.tokenizer
        size = {"length": self.length, "samples": self.samples, "seed": self.seed}
        match task:
            case "needle":
                return needle(tokenizer, text, setting=setting, **size)
            case "multikey":
                return multikey(tokenizer, text, setting=setting, **size)
            case "nll":
                return nll(tokenizer, text, continuation=self.continuation, **size)
            case "agreement":
                return agreement(tokenizer, text, **size)

    def identity(self, loaded: "LoadedModel", text: Text) -> dict[str, object]:
        """Everything but policies, tasks and settings that a sample's result depends on."""
        return {
            **subject(loaded, text),
            "length": self.length,
            "samples": self.samples,
            "seed": self.seed,
            "batch": self.batch,
            "continuation": self.continuation,
        }
