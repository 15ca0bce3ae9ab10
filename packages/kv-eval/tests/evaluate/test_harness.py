"""Tasks of lm-eval over compressed caches: what it asks is answered as the model itself answers."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner, Result

from kv_eval.evaluate.harness import Asked, CompressedLM
from kv_eval.tasks import TaskError
from kv_serve.cli import app
from kv_transformers import passing
from kv_transformers.from_text import make_cache
from kv_transformers.models import LoadedModel

DOCUMENTS = [
    {
        "question": f"The stone of river {i} is",
        "answer": "x",
        "choices": [" a", " bc"],
        "gold": i % 2,
    }
    for i in range(5)
]
GENERATED = """\
task: kv_said
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
CHOSEN = """\
task: kv_chosen
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
LEARNED = """\
task: kv_learned
dataset_path: none
training_split: train
fewshot_split: train
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 2
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
RUN = LEARNED.replace("kv_learned", "kv_run") + "unsafe_code: true\nnum_fewshot: 0\n"
OWN = LEARNED.replace("kv_learned", "kv_own") + "class: !function own.Own\n"
OWN_CLASS = "from lm_eval.api.task import ConfigurableTask\nclass Own(ConfigurableTask): pass\n"


class Request:
    """What lm-eval hands over, as much of it as is looked at."""

    def __init__(self, *args: object) -> None:
        self.args = args


@pytest.fixture
def tasks_folder(tmp_path: Path) -> Path:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    for name, described in {"said": GENERATED, "chosen": CHOSEN}.items():
        (folder / f"{name}.yaml").write_text(described.format(file=file))
    (folder / "learned.yaml").write_text(LEARNED)
    (folder / "run.yaml").write_text(RUN)
    (folder / "own.yaml").write_text(OWN)
    (folder / "own.py").write_text(OWN_CLASS)
    (folder / "group.yaml").write_text("group: kv_group\ntask: [kv_said, kv_chosen]\n")
    return folder


def answered(loaded: LoadedModel, prompt: str, count: int) -> str:
    ids = torch.tensor([loaded.tokenizer.encode(prompt)])
    made = loaded.model.generate(
        ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    return str(loaded.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("spec", ["full", "raw"])
def test_answers_are_the_models_own(loaded: LoadedModel, spec: str) -> None:
    took: list[Asked] = []
    model = CompressedLM(loaded, spec, make_cache, took.append)
    prompt = "The stone of a river is"
    want = answered(loaded, prompt, 12)
    (said,) = model.generate_until([Request(prompt, {"max_gen_toks": 12})])
    assert said == want
    stop = want[3:5]
    (cut,) = model.generate_until([Request(prompt, {"max_gen_toks": 12, "until": [stop]})])
    assert cut == want[: want.index(stop)]
    assert [asked.length for asked in took] == [len(prompt)] * 2
    assert all(asked.full_bytes == 2 * 2 * 2 * 8 * 4 * (len(prompt) - 1) for asked in took)


@pytest.mark.parametrize("spec", ["full", "raw"])
def test_likelihoods_are_the_models_own(loaded: LoadedModel, spec: str) -> None:
    model = CompressedLM(loaded, spec, make_cache)
    context, rest = "The stone of a river is", " as light as paper"
    ids = torch.tensor([loaded.tokenizer.encode(context + rest)])
    with torch.inference_mode():
        logits = loaded.model(ids, **passing(loaded.model, DynamicCache())).logits[0].double()
    places = torch.arange(len(context), len(context + rest))
    found = logits.log_softmax(-1)[places - 1, ids[0, places]]
    ((likely, greedy),) = model.loglikelihood([Request(context, rest)])
    assert likely == pytest.approx(float(found.sum()), abs=1e-3)
    assert not greedy
    said = answered(loaded, context, 4)
    assert model.loglikelihood([Request(context, said)])[0][1]
    (whole,) = model.loglikelihood_rolling([Request(rest)])
    first = torch.tensor([[model.eot_token_id, *loaded.tokenizer.encode(rest)]])
    with torch.inference_mode():
        logits = loaded.model(first, **passing(loaded.model, DynamicCache())).logits[0].double()
    each = logits.log_softmax(-1)[torch.arange(len(rest)), first[0, 1:]]
    assert whole == pytest.approx(float(each.sum()), abs=1e-3)


def test_what_cannot_be_asked_is_refused(loaded: LoadedModel) -> None:
    model = CompressedLM(loaded, "k8v4", make_cache)
    with pytest.raises(TaskError, match="requests sampled answers"):
        model.generate_until([Request("a", {"do_sample": True})])
    with pytest.raises(TaskError, match="requests sampled answers"):
        model.generate_until([Request("a", {"temperature": 0.5})])
    with pytest.raises(TaskError, match="exceeds the context length 1,024 of"):
        model.generate_until([Request("a" * 1000, {"max_gen_toks": 30})])


def test_a_task_that_does_not_sample_is_greedy_at_any_temperature(loaded: LoadedModel) -> None:
    """As LongBench's tasks are written."""
    model = CompressedLM(loaded, "raw", make_cache)
    plain, hot = (
        Request("The stone", {"max_gen_toks": 6} | more)
        for more in ({}, {"do_sample": False, "temperature": 1})
    )
    assert model.generate_until([hot]) == model.generate_until([plain])


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def said(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).replace("│", " ").split())


def test_help_names_the_extra_that_is_needed() -> None:
    result = CliRunner().invoke(app, ["eval", "--help"], env={"COLUMNS": "300"})
    assert "Needs lm-eval." in " ".join(result.stdout.replace("│", " ").split())


def test_tasks_of_lm_eval_are_rows_beside_our_own(
    folder: Path, tasks_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    common = ("--model", folder, "--policy", "raw,k4v2", "--samples", 3, "--json", file)
    asked = ("--lm-eval", "kv_said", "--lm-eval", "kv_chosen", "--tasks-folder", tasks_folder)
    ours = ("--task", "nll", "--length", 60, "--continuation", 5, "--text", text_file)
    result = run(*common, *asked, *ours)
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    rows = {(row["task"], row["policy"]): row for row in found["rows"]}
    names = {task for task, _ in rows}
    assert names >= {"nll", "lm-eval:kv_said:exact_match", "lm-eval:kv_chosen:acc"}
    for name in names:
        assert {policy for task, policy in rows if task == name} == {"full", "raw", "k4v2"}
        assert rows[name, "raw"]["score"] == pytest.approx(rows[name, "full"]["score"], abs=1e-5)
        assert rows[name, "k4v2"]["samples"] == 3
    chosen = rows["lm-eval:kv_chosen:acc", "k4v2"]
    assert chosen["kv_bytes"] < chosen["full_bytes"]
    assert found["settings"]["lm_eval_samples"] == 3


def test_what_is_finished_is_not_asked_again(
    folder: Path, tasks_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    asked = ("--lm-eval", "kv_said", "--tasks-folder", tasks_folder, "--samples", 2)
    given = ("--model", folder, "--policy", "raw", "--json", file, *asked)
    real = CompressedLM.generate_until
    specs: list[str] = []

    def once(self: CompressedLM, requests: list[object], disable_tqdm: bool = False) -> list[str]:
        specs.append(self._spec)
        if specs == ["full", "raw"]:
            raise KeyboardInterrupt
        return real(self, requests, disable_tqdm)

    monkeypatch.setattr(CompressedLM, "generate_until", once)
    assert run(*given).exit_code == 130
    assert run(*given).exit_code == 0
    assert specs == ["full", "raw", "raw"]


def test_a_question_is_none_of_its_own_examples(
    folder: Path, tasks_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval leaves the question out only where examples are of the split that is asked."""
    contexts: list[str] = []

    def noted(self: CompressedLM, requests: list[Request], disable_tqdm: bool = False) -> list[str]:
        contexts.extend(str(request.args[0]) for request in requests)
        self._done(Asked(1, 1, 1, 0.0))
        return ["x"] * len(requests)

    monkeypatch.setattr(CompressedLM, "generate_until", noted)
    documents = tmp_path / "documents.jsonl"
    result = run(
        *("--model", folder, "--policy", "full", "--json", tmp_path / "found.json"),
        *("--lm-eval", "kv_learned", "--tasks-folder", tasks_folder, "--shots", 4),
        *("--data", f"kv_learned={documents}", "--samples", 5),
    )
    assert result.exit_code == 0, result.output
    for document, context in zip(DOCUMENTS, contexts, strict=True):
        questions = [f"{each['question']}" for each in DOCUMENTS]
        assert sorted(questions) == sorted(
            line.removesuffix(" x") for line in context.splitlines() if line
        )
        assert context.endswith(f"{document['question']}")


@pytest.mark.parametrize(
    ("task", "options", "sentence"),
    [
        ("kv_run", (), "kv_run runs code that the model writes; --allow-code permits it"),
        ("kv_run", ("--allow-code", "--shots", 1), "kv_run is always asked without examples"),
        ("kv_own", (), "kv_own is written in Python and may load documents itself; remove --data"),
        ("kv_group", (), "kv_group is a group of tasks, which needs several files; remove"),
    ],
)
def test_what_a_task_may_not_is_refused(
    folder: Path,
    tasks_folder: Path,
    tmp_path: Path,
    task: str,
    options: tuple[object, ...],
    sentence: str,
) -> None:
    result = run(
        *("--model", folder, "--policy", "raw", "--json", tmp_path / "x.json"),
        *("--lm-eval", task, "--tasks-folder", tasks_folder),
        *("--data", f"{task}={tmp_path / 'documents.jsonl'}", *options),
    )
    assert result.exit_code == 2, result.output
    assert sentence in said(result)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "no task given; use --task, as in --task needle, or --lm-eval TASK"),
        (
            ("--lm-eval", "no_such_task"),
            "lm-eval has no task no_such_task; `lm-eval ls",
        ),
        (("--lm-eval", "gsm8k", "--data", "gsm8k"), "is not of the form TASK=FILE"),
        (("--lm-eval", "gsm8k", "--data", "arc=x"), "which --lm-eval does not name"),
        (("--lm-eval", "gsm8k", "--data", "gsm8k=nothing"), "file nothing not found"),
        (("--lm-eval", "gsm8k", "--host", "vllm"), "lm-eval has its own vLLM support"),
    ],
)
def test_refusals(folder: Path, tmp_path: Path, options: tuple[str, ...], sentence: str) -> None:
    result = run("--model", folder, "--policy", "raw", "--json", tmp_path / "x.json", *options)
    assert result.exit_code == 2, result.output
    assert sentence in said(result)
