"""Tasks of lm-eval for every policy, as finished samples like those of our own tasks."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from kv_eval.evaluate.journal import Finished, Journal
from kv_eval.extras import LM_EVAL
from kv_eval.tasks import TaskError
from kv_policy.installing import install_command
from kv_transformers.from_text import MakeCache

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from kv_eval.evaluate.harness import Asked
    from kv_transformers.models import LoadedModel

PREFIX: Final = "lm-eval:"  # of these tasks' names in a result
AWARE: Final = "aware"  # the question is inside the task's own prompt
WITHOUT: Final = "remove --data, or name a task that a YAML file describes"


@dataclass(frozen=True, slots=True)
class Harness:
    """Selection and options of lm-eval tasks.

    Attributes:
        tasks: names of lm-eval tasks.
        samples: number of documents per task, from the first on.
        shots: examples before each question; None for the task's default.
        seed: of the choice of examples.
        data: local files with documents, instead of a download, by task.
        folder: a folder with more task definitions; None for lm-eval's own.
        chat: whether to apply the model's chat template to prompts.
        code: whether a task may run code that the model writes.
    """

    tasks: tuple[str, ...]
    samples: int
    shots: int | None = None
    seed: int = 0
    data: Mapping[str, Path] | None = None
    folder: Path | None = None
    chat: bool = False
    code: bool = False

    def identity(self) -> dict[str, str | int]:
        """Return everything that results depend on."""
        from importlib.metadata import version

        files = {task: str(path) for task, path in (self.data or {}).items()}
        return {
            "lm_eval": version("lm-eval"),
            "lm_eval_samples": self.samples,
            "lm_eval_shots": "" if self.shots is None else self.shots,
            "lm_eval_seed": self.seed,
            "lm_eval_data": str(files),
            "lm_eval_chat": int(self.chat),
        }


def expect_installed() -> None:
    """Raise if lm-eval is not installed.

    Raises:
        TaskError: lm-eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise TaskError(
            f"lm-eval is not installed, but these tasks need it: `{install_command(LM_EVAL)}`"
        )


def read_data(given: Iterable[str], tasks: Iterable[str]) -> dict[str, Path]:
    """Parse the files of tasks' documents from `TASK=FILE`.

    Raises:
        TaskError: a text is not of that form, its task is not selected, or its file is missing.
    """
    asked, found = set(tasks), {}
    for each in given:
        task, equal, name = each.partition("=")
        if not equal or not name:
            raise TaskError(f"--data {each} is not of the form TASK=FILE, as in gsm8k=test.jsonl")
        if task not in asked:
            raise TaskError(f"--data {each} is for the task {task}, which --lm-eval does not name")
        path = Path(name)
        if not os.path.isfile(path):
            raise TaskError(f"--data {each}: file {path} not found")
        found[task] = path.resolve()
    return found


def run(
    loaded: "LoadedModel",
    harness: Harness,
    policies: Sequence[str],
    journal: Journal,
    make: MakeCache,
    tell: Callable[[str], None] = lambda words: None,
) -> Iterator[Finished]:
    """Run every task with every policy; yield the samples of a task once all are finished.

    Results of a task and policy in the journal are yielded at once and not run again. `tell` is
    called with the current progress.

    Raises:
        TaskError: lm-eval is not installed, a task is unknown or cannot be read, or a metric is not
            per document.
    """
    manager = _manager(harness, tell)
    for task in harness.tasks:
        for spec in policies:
            known = journal.of(spec, f"{PREFIX}{task}:")
            if not known:
                known = _asked(loaded, harness, manager, task, spec, make, tell)
                journal.append(known)
            yield from known


def _manager(harness: Harness, tell: Callable[[str], None]) -> "TaskManager":
    """Return the task manager; load lm-eval's thousands of task files only if needed."""
    from lm_eval.tasks import TaskManager

    if harness.folder is not None:
        found = TaskManager(include_path=str(harness.folder), include_defaults=False)
        if {*harness.tasks} <= {*found.all_tasks}:
            return found
    tell("reading the task list of lm-eval")
    found = TaskManager(include_path=None if harness.folder is None else str(harness.folder))
    unknown = [task for task in harness.tasks if task not in found.all_tasks]
    if unknown:
        raise TaskError(
            f"lm-eval has no task {', '.join(unknown)}; `lm-eval ls tasks` lists all tasks"
        )
    return found


def _asked(
    loaded: "LoadedModel",
    harness: Harness,
    manager: "TaskManager",
    task: str,
    spec: str,
    make: MakeCache,
    tell: Callable[[str], None],
) -> list[Finished]:
    from lm_eval import simple_evaluate

    from kv_eval.evaluate.harness import CompressedLM

    took: list[Asked] = []

    def done(asked: "Asked") -> None:
        took.append(asked)
        tell(f"{PREFIX}{task}: {spec}, {len(took):,} requests")

    model = CompressedLM(loaded, spec, make, done)
    try:
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=_load(task, harness, manager),
            num_fewshot=harness.shots,
            limit=harness.samples,
            apply_chat_template=harness.chat,
            fewshot_as_multiturn=harness.chat,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=harness.code,
            random_seed=harness.seed,
            numpy_random_seed=harness.seed,
            torch_random_seed=harness.seed,
            fewshot_random_seed=harness.seed,
        )
    except OSError as error:  # raised by the hub and by files
        raise TaskError(
            f"lm-eval cannot read {task} or its documents: {type(error).__name__}: {error}; a "
            f"local file can be used instead, as in --data {task}=FILE"
        ) from error
    return _finished(task, spec, found, took)


def _load(task: str, harness: Harness, manager: "TaskManager") -> list["Task"]:
    """Load a task with its documents, or all tasks of a group."""
    path = (harness.data or {}).get(task)
    with TemporaryDirectory() as folder:
        name = task if path is None else _of_file(task, path, manager, Path(folder))
        found = [*manager.load([name])["tasks"].values()]
    for each in found:
        if each.get_config("unsafe_code") and not harness.code:
            raise TaskError(
                f"{task} runs code that the model writes; --allow-code permits it, preferably in a "
                "container"
            )
        if harness.shots and each.get_config("num_fewshot") == 0:
            raise TaskError(f"{task} is always asked without examples; remove --shots")
        if path is not None and each.fewshot_cfg.samples is None:
            # lm-eval excludes a document from its own examples only if both are of one split
            each.fewshot_cfg.split = each.get_config("test_split")
    return found


def _of_file(task: str, path: Path, manager: "TaskManager", folder: Path) -> str:
    """Write a task definition with all splits in one file; return its path."""
    entry = manager.task_index[task]
    if entry.kind.name == "PY_TASK":
        raise TaskError(f"{task} is written in Python and may load documents itself; {WITHOUT}")
    if entry.kind.name != "TASK":
        raise TaskError(f"{task} is a group of tasks, which needs several files; {WITHOUT}")
    splits = dict.fromkeys(("train", "validation", "test", "dev"), str(path))
    again = {
        "include": str(entry.yaml_path),
        "task": task,
        "custom_dataset": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": splits},
    }
    file = folder / "task.yaml"
    file.write_text(json.dumps(again))  # JSON is valid YAML
    return str(file)


def _finished(
    task: str, spec: str, found: dict[str, Any], took: "Sequence[Asked]"
) -> list[Finished]:
    """Return one sample for each document and metric.

    A document may need several requests, so bytes and seconds are means over the task.
    """
    if not took:
        raise TaskError(f"lm-eval found no documents of {task}")
    samples = [one for every in found["samples"].values() for one in every]
    length, kv_bytes, full_bytes = (
        round(fmean(values))
        for values in zip(*((a.length, a.kv_bytes, a.full_bytes) for a in took), strict=True)
    )
    return [
        Finished(
            policy=spec,
            task=f"{PREFIX}{task}:{metric}{_filter(one)}",
            setting=AWARE,
            sample=int(one["doc_id"]),
            score=_number(task, metric, one[metric]),
            kv_bytes=kv_bytes,
            full_bytes=full_bytes,
            seconds=sum(asked.seconds for asked in took) / len(samples),
            length=max(length, 1),
        )
        for one in samples
        for metric in one["metrics"]
    ]


def _filter(one: dict[str, Any]) -> str:
    name = one.get("filter", "none")
    return "" if name == "none" else f",{name}"


def _number(task: str, metric: str, value: object) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    raise TaskError(
        f"{metric} of {task} is a metric over all documents, not per document; such tasks cannot "
        "be compared sample by sample (for perplexity use the task nll)"
    )
