"""`kv-serve eval`: the cost of policies in answers and their saving in bytes, as a JSON file."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kv_eval.cli.evaluation import SampleRun, Tell, finish
from kv_serve.cli.host import expect_vllm
from kv_transformers.cli.console import check_writable, refuse
from kv_transformers.cli.options import (
    BackendOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    ModelOption,
    caches_by,
    expect_backend,
    load_model,
    reading_policy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kv_eval.evaluate.harness_tasks import Harness
    from kv_eval.evaluate.journal import Finished, Journal
    from kv_eval.evaluate.plan import Plan
    from kv_eval.tasks import Text
    from kv_transformers.from_text import MakeCache
    from kv_transformers.models import LoadedModel


class Task(StrEnum):
    """The tasks of `kv_eval.tasks`."""

    NEEDLE = "needle"
    MULTIKEY = "multikey"
    PASSKEY = "passkey"
    VARIABLE_TRACKING = "variable-tracking"
    COMMON_WORDS = "common-words"
    NLL = "nll"
    AGREEMENT = "agreement"
    NIAH_SINGLE_1 = "niah_single_1"
    NIAH_SINGLE_2 = "niah_single_2"
    NIAH_SINGLE_3 = "niah_single_3"
    NIAH_MULTIKEY_1 = "niah_multikey_1"
    NIAH_MULTIKEY_2 = "niah_multikey_2"
    NIAH_MULTIKEY_3 = "niah_multikey_3"
    NIAH_MULTIVALUE = "niah_multivalue"
    NIAH_MULTIQUERY = "niah_multiquery"
    VT = "vt"
    CWE = "cwe"
    FWE = "fwe"
    QA_1 = "qa_1"
    QA_2 = "qa_2"


class Where(StrEnum):
    """Position of the question: inside the compressed prompt, or after it."""

    AWARE = "aware"
    AGNOSTIC = "agnostic"
    BOTH = "both"


class Host(StrEnum):
    """The engine that runs the model."""

    TRANSFORMERS = "transformers"
    VLLM = "vllm"


def _known_tasks(names: list[str] | None) -> list[str] | None:
    """Refuse names of no task and of no group."""
    if names:
        from kv_eval.evaluate.plan import expand_tasks

        try:
            expand_tasks(names)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return names


def evaluate(
    policy: Annotated[
        list[str],
        typer.Option(
            help="Policies to compare, separated by commas or as repeated options, for example "
            "k8v4,snapkv:budget=1024,window=32+k8v4. A comma starts the next policy when no `=` "
            "follows before the next comma, `+` or `:`. Choices in braces expand to one policy "
            "each: 'kv-compress:keep={50,25}%+k8v4'. `full`, transformers' own cache, is always "
            "run, and may be the only one."
        ),
    ],
    json: Annotated[Path, typer.Option(help="Output file of the result.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "--tasks",
            callback=_known_tasks,
            help="needle: find one number hidden in a text. multikey: one of four. passkey: one in "
            "a text that repeats itself. variable-tracking: which variables got a value through "
            "others. common-words: the ten most frequent words of a list. nll: nats per token of a "
            "true continuation, and in transformers how far next-token distributions are from the "
            "full cache's (Kullback-Leibler divergence). agreement: share of tokens equal to "
            "the full cache's. ruler: the thirteen tasks of RULER, from niah_single_1 to qa_2, and "
            "their mean. May be repeated.",
        ),
    ] = None,
    model: ModelOption = None,
    setting: Annotated[
        Where,
        typer.Option(
            help="Whether the question is inside the compressed prompt (aware) or comes after it "
            "(agnostic); nll and agreement have no question and are always agnostic. Under vLLM a "
            "question is always inside."
        ),
    ] = Where.BOTH,
    host: Annotated[
        Host,
        typer.Option(
            help="What runs the model: transformers, or vllm, with an engine for each policy. "
            "Under vllm, `full` is vLLM's own cache, and bytes are those of the allocated blocks."
        ),
    ] = Host.TRANSFORMERS,
    length: Annotated[int, typer.Option(min=2, help="Tokens per prompt.")] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Prompts per task, setting and seed.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of numbers, depths and windows.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from --seed on.")] = 1,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text to cut prompts from; by default Python's own help topics."),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Samples that run together in nll, agreement and ruler.")
    ] = 4,
    continuation: Annotated[
        int, typer.Option(min=1, help="Tokens that nll scores after each prompt.")
    ] = 256,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            help="A task of lm-eval, as `lm-eval ls tasks` lists them, for the first --samples of "
            "its documents. Needs lm-eval. May be repeated."
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(min=0, help="Examples before a question of lm-eval; by default the task's."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="TASK=FILE: a JSON or JSON-lines file with a task's documents, instead of a "
            "download by lm-eval. May be repeated."
        ),
    ] = None,
    tasks_folder: Annotated[
        Path | None, typer.Option(help="A folder with more task definitions for lm-eval.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Apply the model's chat template to prompts of lm-eval.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option(help="Let tasks of lm-eval run the code that the model writes.")
    ] = False,
    dtype: DtypeOption = Dtype.AUTO,
    device: DeviceOption = None,
    backend: BackendOption = "auto",
) -> None:
    """Measure policies on tasks, beside the full cache, and write a JSON file.

    The same options give the same samples. Each finished sample is saved in FILE.partial at once:
    run the same command again to resume after an interruption.
    """
    from kv_eval.evaluate.harness_tasks import Harness, expect_installed, read_data
    from kv_eval.evaluate.plan import SETTINGS, Plan, expand_tasks
    from kv_eval.evaluate.specs import read_specs
    from kv_eval.tasks import default_text, read_text

    if not task and not lm_eval:
        refuse("no task given; use --task, as in --task needle, or --lm-eval TASK")
    with reading_policy(model):
        plan = Plan(
            policies=read_specs(policy),
            tasks=expand_tasks(task or ()),
            settings=tuple(s for s in SETTINGS if setting in (s, Where.BOTH)),
            length=length,
            samples=samples,
            seed=seed,
            seeds=seeds,
            batch=batch,
            continuation=continuation,
            split=host is Host.TRANSFORMERS,
        )
        harness = Harness(
            tasks=tuple(dict.fromkeys(lm_eval or ())),
            samples=samples,
            shots=shots,
            seed=seed,
            data=read_data(data or (), lm_eval or ()),
            folder=tasks_folder,
            chat=chat,
            code=allow_code,
        )
        source = default_text() if text is None else read_text(text)
        if harness.tasks:
            expect_installed()
    check_writable(json)
    if host is Host.VLLM:
        if backend != "auto" or device is not None:
            refuse(
                "--backend and --device are for transformers; vLLM uses its own backend and "
                "finds its device, so remove them with --host vllm"
            )
        if harness.tasks:
            refuse("--lm-eval is for transformers; lm-eval has its own vLLM support")
        expect_vllm()
        loaded = load_model(model, dtype, "cpu")  # for its tokenizer and its identity
        finish(loaded, [_samples(loaded, plan, source, host, None)], json, None)
        return
    expect_backend(backend)
    loaded = load_model(model, dtype, device)
    make, served = caches_by(loaded, backend)
    works = [_samples(loaded, plan, source, host, make)] if plan.tasks else []
    if harness.tasks:
        works.append(_documents(loaded, harness, plan.policies, make))
    finish(loaded, works, json, served)


def _samples(
    loaded: "LoadedModel", plan: "Plan", text: "Text", host: Host, make: "MakeCache | None"
) -> SampleRun:
    """Return the run of our own tasks; without `make` it is for vLLM."""
    from kv_eval.evaluate import runner, under_vllm
    from kv_eval.evaluate.report import kept, rows

    def run(journal: "Journal", tell: Tell) -> "Iterator[Finished]":
        if make is None:
            return under_vllm.run(loaded, plan, text, journal)
        return runner.run(loaded, plan, text, journal, make)

    return SampleRun(
        settings=plan.identity(loaded, text) | {"host": host.value},
        total=len(plan.pairs) * len(plan.policies) * plan.each,
        run=run,
        rows=lambda journal: rows(plan, journal),
        kept=lambda journal: kept(plan, journal),
        policies=plan.policies,
    )


def _documents(
    loaded: "LoadedModel", harness: "Harness", policies: tuple[str, ...], make: "MakeCache"
) -> SampleRun:
    """Return the run of lm-eval's tasks."""
    from kv_eval.evaluate.harness_tasks import run
    from kv_eval.evaluate.provenance import model_identity
    from kv_eval.evaluate.report import harness_rows

    return SampleRun(
        settings=model_identity(loaded) | harness.identity(),
        total=None,
        run=lambda journal, tell: run(loaded, harness, policies, journal, make, tell),
        rows=lambda journal: harness_rows(harness, policies, journal),
        kept=lambda journal: {},
        policies=policies,
    )
