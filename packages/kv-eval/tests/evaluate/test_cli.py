"""The command line: what each command prints, writes, and refuses with a sentence."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from statistics import fmean

import pytest
from typer.testing import CliRunner, Result

import kv_eval.evaluate.runner as runner
import kv_transformers.from_text as caches
from closed_pipe import run_unread
from kv_eval.cli.eval import Task, Where
from kv_eval.evaluate.journal import Finished
from kv_eval.evaluate.plan import SETTINGS, TASKS
from kv_eval.tasks import RULER
from kv_policy import registry
from kv_runtime import serving
from kv_serve.cli import app, main


def run(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def refused(*arguments: object, stdin: str | None = None) -> str:
    """Check that a command leaves with status 2 and says why; give what it said, on one line."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)
    return " ".join(plain.replace("│", " ").split())


# policies


def test_policies_lists_each_with_what_it_does_and_its_source() -> None:
    result = run("policies")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert {"k{1,2,3,4,8}v{1,2,3,4,8}", "snapkv", "streaming", "raw"} <= set(lines)
    assert "Keys in {1,2,3,4,8} bits, values in {1,2,3,4,8}." in lines["k{1,2,3,4,8}v{1,2,3,4,8}"]
    assert "SnapKV, Li et al., 2024" in lines["snapkv"]


def test_policies_of_a_name_lists_its_parameters() -> None:
    result = run("policies", "snapkv")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert lines["source:"].startswith("source: SnapKV")
    assert lines["window"].split()[:3] == ["window", "int", "32"]
    assert "kept per KV head" in lines["budget"]
    assert "It has no parameters." in run("policies", "raw").stdout


def test_policies_refuses_an_unknown_name() -> None:
    assert "unknown policy 'nope'; installed policies: ada-" in refused("policies", "nope")


def test_a_broken_package_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = EntryPoint.load

    def load(entry: EntryPoint) -> object:
        if entry.name == "raw":
            raise ImportError("libmissing.so")
        return real(entry)

    monkeypatch.setattr(EntryPoint, "load", load)
    said = " ".join(run("policies").stdout.split())
    assert "broken: the policy 'raw' of kv-policy cannot be loaded: ImportError: libmiss" in said
    assert "Keys in {1,2,3,4,8} bits, values in {1,2,3,4,8}." in said
    assert "'raw' of kv-policy cannot be loaded" in refused("policies", "raw")
    assert "'raw' of kv-policy cannot be loaded" in refused("generate", "--policy", "raw", "a")
    assert "unknown policy" not in run("policies", "SnapKV").output


def test_a_name_that_two_packages_claim_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = registry.entry_points

    def twice(group: str) -> list[EntryPoint]:
        return [*real(group=group), EntryPoint("k8v4", "other.format:K8V4", group)]

    monkeypatch.setattr(registry, "entry_points", twice)
    said = " ".join(run("policies").stdout.split())
    assert "2 installed packages claim the policy 'k8v4': kv-quant (kv_quant" in said
    assert "SnapKV, Li et al." in said
    assert "claim the policy 'k8v4'" in refused("policies", "k8v4")
    assert run("policies", "snapkv").exit_code == 0


# generate


def test_generate_streams_and_says_what_is_held(folder: Path) -> None:
    short = ("generate", "--model", folder, "--max-new-tokens", 12, "Hello there")
    full = run(*short, "--policy", "full")
    assert full.exit_code == 0, full.output
    assert "full: " in full.stderr
    assert ", 1.000 of the full " in full.stderr
    assert " ms per token" in full.stderr
    raw = run(*short, "--policy", "raw")
    assert raw.stdout == full.stdout != ""
    compressed = run(*short, "--policy", "k8v4")
    assert compressed.exit_code == 0, compressed.output
    assert "k8v4: " in compressed.stderr
    # <user>, the prompt, <end>, <assistant>
    assert f"{len('Hello there') + 3} + 12 tokens" in compressed.stderr


def test_generate_reads_a_file_before_the_prompt(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("A text.\n\n")
    tail = ("--model", folder, "--max-new-tokens", 5, "--raw", "--policy", "full")
    both = run("generate", "--prompt-file", file, *tail, "A question?")
    assert both.exit_code == 0, both.output
    assert f"{len('A text.') + 2 + len('A question?')} + " in both.stderr
    whole = run("generate", *tail, "A text.\n\nA question?")
    assert whole.stdout == both.stdout
    piped = run("generate", "--prompt-file", "-", *tail, "A question?", stdin="A text.\n")
    assert piped.stdout == both.stdout


def test_generate_samples_from_a_seed(folder: Path) -> None:
    def said(*options: object) -> str:
        base = ("generate", "--model", folder, "--max-new-tokens", 30, "--policy", "full")
        result = run(*base, *options, "Hello")
        assert result.exit_code == 0, result.output
        return result.stdout

    hot = ("--temperature", 5.0)
    assert said(*hot, "--seed", 1) == said(*hot, "--seed", 1) != said(*hot, "--seed", 2)
    assert said("--seed", 1) == said("--seed", 2)


@pytest.mark.parametrize("prompt", [[], [""], ["  \n"]])
def test_generate_refuses_an_empty_prompt(prompt: list[str]) -> None:
    assert "the prompt is empty; give a text as PROMPT" in refused("generate", *prompt)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; installed policies:"),
        (("--policy", "k8v4:bits=3"), "k8v4 has no parameter 'bits'; its parameters: group"),
        (("--policy", "snapkv:budget=16"), "smaller than the 32 it protects"),
        (("--policy", "snapkv:budget=lots"), "budget 'lots' is not understood"),
        (("--policy", "k8v4+k4v2"), "keep one of them"),
        (("--model", "./nothing-here"), "unknown model './nothing-here'"),
        (("--model", "missing.gguf"), "file not found: missing.gguf"),
        (("--prompt-file", "missing.txt"), "missing.txt cannot be read"),
        (("--max-new-tokens", "0"), "--max-new-tokens"),
        (("--temperature", "-1"), "--temperature"),
        (("--dtype", "int4"), "--dtype"),
        (("--backend", "fast"), "unknown backend 'fast'; choose one of reference, torch"),
    ],
)
def test_generate_refuses(options: tuple[str, str], sentence: str, folder: Path) -> None:
    assert sentence in refused("generate", "--model", folder, *options, "Hello")


def test_generate_refuses_what_the_model_cannot_take(
    folder: Path, plain_folder: Path, tmp_path: Path
) -> None:
    long = "x" * 1000
    said = refused("generate", "--model", folder, "--max-new-tokens", 50, long)
    assert "the prompt has 1,003 tokens and --max-new-tokens is 50" in said
    assert "has no chat template" in refused("generate", "--model", plain_folder, "Hello")
    device = ("--device", "abacus")
    assert "device='abacus' is not usable" in refused("generate", "--model", folder, *device, "Hi")
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    assert "is not UTF-8 text" in refused("generate", "--prompt-file", latin)


# eval


@pytest.fixture
def options(folder: Path, text_file: Path) -> tuple[object, ...]:
    size = ("--length", 200, "--samples", 2, "--seed", 5)
    return ("--model", folder, "--text", text_file, *size, "--continuation", 4)


def test_eval_writes_what_is_documented(options: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    specs = "k8v4,snapkv:budget=64,window=16+k8v4"
    tasks = ("--task", "needle", "--task", "nll", "--task", "agreement")
    result = run("eval", *options, "--policy", specs, *tasks, "--json", path)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert list(found) == [
        *("model", "commit", "versions", "settings", "machine", "attention", "rows", "kept")
    ]
    assert found["settings"]["length"] == 200
    assert found["settings"]["host"] == "transformers"
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["kv-serve"]
    assert found["attention"] == asdict(serving("cpu"))
    canonical = ["full", "k8v4", "snapkv:budget=64,window=16+k8v4"]
    pairs = [
        ("needle", "aware"),
        ("needle", "agnostic"),
        ("nll", "agnostic"),
        ("agreement", "agnostic"),
    ]
    # All tokens of every prompt, the last of which is fed after the others; the mean of 8 samples.
    assert set(found["kept"]) == {*canonical[1:]}
    full, some = (found["kept"][spec] for spec in canonical[1:])
    assert {len(layer) for layer in full} == {2}
    assert len(full) == 2
    assert all(150 < heads < 200 for layer in full for heads in layer)
    assert {heads for layer in some for heads in layer} == {64.0}
    rows = found["rows"]
    assert [(r["task"], r["setting"], r["policy"]) for r in rows] == [
        (*pair, spec) for pair in pairs for spec in canonical
    ]
    for row in rows:
        change = ("change_interval",) if row["policy"] != "full" else ()
        apart = ("divergence", "divergence_interval", "divergence_tail")
        apart = apart if change and row["task"] == "nll" else ()
        assert list(row) == [
            *("policy", "task", "setting", "length", "samples", "seed", "score", "full_score"),
            *("score_interval", *change, *apart, *(("kept_share",) if change else ())),
            *("kv_bytes", "full_bytes", "seconds"),
        ]
        assert (row["length"], row["samples"], row["seed"]) == (200, 2, 5)
        assert row["seconds"] > 0
    assert [p.name for p in path.parent.iterdir()] == ["out.json"]
    assert result.stdout.count("\n") == len(rows) + 1
    assert " KL 99.9 % " in result.stdout.splitlines()[0]
    assert "KL" not in run(*command_without_nats(options, tmp_path)).stdout
    repeated = tmp_path / "again.json"
    several = ("--policy", "snapkv:budget=64,window=16+k8v4", "--policy", "full")
    result = run("eval", *options, *several, "--task", "nll", "--json", repeated)
    assert result.exit_code == 0, result.output
    scores = {r["policy"]: r["score"] for r in rows if r["task"] == "nll"}
    for row in json.loads(repeated.read_text())["rows"]:
        assert row["score"] == scores[row["policy"]]


def command_without_nats(options: tuple[object, ...], folder: Path) -> tuple[object, ...]:
    path = folder / "without.json"
    return ("eval", *options, "--policy", "full", "--task", "agreement", "--json", path)


@pytest.fixture
def roomy(folder: Path, tmp_path: Path) -> Path:
    """The tiny model, reading more tokens: each is a letter."""
    copy = tmp_path / "roomy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    return copy


def test_eval_runs_a_group_of_tasks_and_says_their_mean(roomy: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    policy = "snapkv:budget=64,window=16+k8v4"
    size = ("--length", 1600, "--samples", 2, "--setting", "agnostic", "--json", path)
    result = run("eval", "--model", roomy, *size, "--tasks", "ruler", "--policy", policy)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["task"] for row in rows[::2]] == [*RULER, "ruler"]
    assert [row["policy"] for row in rows] == ["full", policy] * 14
    full, mine = rows[-2:]
    for last, each in ((full, rows[:-2:2]), (mine, rows[1:-2:2])):
        assert last["score"] == pytest.approx(fmean(row["score"] for row in each))
        assert last["kv_bytes"] == pytest.approx(fmean(row["kv_bytes"] for row in each), abs=1)
        assert last["samples"] == 2
    assert "kept_share" not in full
    assert mine["kept_share"] == pytest.approx(fmean(row["kept_share"] for row in rows[1:-2:2]))
    assert 64 / 1600 < mine["kept_share"] < 64 / 1200
    assert " tokens " in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-1].split()[:2] == [policy, "ruler"]
    some = tmp_path / "some.json"
    command = ("eval", "--model", roomy, *size[:-1], some, "--policy", policy)
    result = run(*command, "--task", "vt", "--task", "qa_1")
    assert result.exit_code == 0, result.output
    tasks = [row["task"] for row in json.loads(some.read_text())["rows"]]
    assert tasks == ["vt", "vt", "qa_1", "qa_1"], "a mean over a part of the group"


@pytest.mark.model
@pytest.mark.slow
def test_eval_asks_smollm2_tasks_of_ruler(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    size = ("--length", 640, "--samples", 2, "--setting", "agnostic", "--json", path)
    tasks = ("--task", "niah_single_1", "--task", "niah_single_2", "--task", "vt", "--task", "qa_1")
    result = run("eval", *size, *tasks, "--policy", "k8v4")
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    scores = {(row["task"], row["policy"]): row["score"] for row in rows}
    assert len(scores) == 8
    for policy in ("full", "k8v4"):
        assert scores["niah_single_1", policy] == scores["niah_single_2", policy] == 1.0
    assert all(row["kept_share"] == 1.0 for row in rows if row["policy"] == "k8v4")


def test_eval_attends_by_the_backend_that_is_named(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], caches.make_cache

    def noting(model: object, spec: str, backend: str, **options: object) -> object:
        made.append(backend)
        return make(model, spec, backend, **options)

    monkeypatch.setattr(caches, "make_cache", noting)
    path = tmp_path / "out.json"
    command = ("eval", *options, "--policy", "raw", "--task", "agreement", "--json", path)
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        run(*command, "--backend", "torch")
    result = run(*command, "--backend", "reference")
    assert result.exit_code == 0, result.output
    assert set(made) == {"torch", "reference"}
    assert "attention was 'torch' and is 'reference'" in " ".join(result.stderr.split())
    found = json.loads(path.read_text())
    assert found["attention"] == {"backend": "reference", "instructions": None}


def test_eval_gives_the_same_rows_again(options: tuple[object, ...], tmp_path: Path) -> None:
    def rows(name: str) -> list[dict[str, object]]:
        path = tmp_path / name
        what = ("--policy", "raw,streaming:budget=64,sinks=2", "--task", "nll")
        result = run("eval", *options, *what, "--task", "agreement", "--json", path)
        assert result.exit_code == 0, result.output
        return json.loads(path.read_text())["rows"]

    first, second = rows("a.json"), rows("b.json")
    for row in (*first, *second):
        del row["seconds"]
    assert first == second
    scores = {(r["policy"], r["task"]): r["score"] for r in first}
    assert {policy for policy, _ in scores} == {"full", "raw", "streaming:budget=64,sinks=2"}
    assert scores["raw", "agreement"] == 1.0
    assert scores["raw", "nll"] == pytest.approx(scores["full", "nll"], abs=1e-5)


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.run

    def some(*arguments: object) -> Iterator[Finished]:
        going = real(*arguments)
        for _ in range(count):
            yield next(going)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", some)


def test_eval_goes_on_after_an_interruption(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    partial = tmp_path / "out.json.partial"
    command = ("eval", *options, "--policy", "k8v4", "--task", "needle", "--json", path)
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        result = run(*command)
    assert result.exit_code == 130
    said = " ".join(result.stderr.split())
    assert "Interrupted. 3 samples are finished and saved in" in said
    assert "run the same command again to resume" in said
    assert partial.exists()
    assert not path.exists()
    kept = partial.read_bytes()
    with monkeypatch.context() as patch:
        interrupt_after(5, patch)
        result = run(*command)
    said = " ".join(result.stderr.split())
    assert "where 3 samples are finished" in said
    assert partial.read_bytes().startswith(kept)
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "where 5 samples are finished" in " ".join(result.stderr.split())
    assert path.exists()
    assert not partial.exists()


def test_eval_starts_anew_when_the_settings_changed(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    command = ("eval", *options, "--policy", "full", "--task", "nll", "--json", path)
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        run(*command)
    result = run(*command, "--seed", 6)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "has samples of other settings: seed was 5 and is 6. It is renamed to" in said
    assert json.loads(path.read_text())["rows"][0]["seed"] == 6


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--policy", "nope"), "`full`, alone, names transformers' own cache"),
        (("--policy", "k8v4,,k4v2"), "has an empty item"),
        (("--policy", "k8v4", "--policy", "k8v4"), "the policy k8v4 is named twice"),
        (("--policy", "snapkv:budget=16,window=32"), "smaller than the"),
        (("--length", "1"), "--length"),
        (("--samples", "0"), "--samples"),
        (("--seed", "-1"), "--seed"),
        (("--task", "riddle"), "unknown task 'riddle'; tasks and groups of them: needle, multi"),
        (("--tasks", "ruler", "--length", "300"), "length=300: niah_multikey_1 needs"),
        (("--setting", "aware", "--task", "nll"), "nll has no question that could be inside"),
        (("--text", "missing.txt"), "cannot read the text missing.txt"),
        (("--length", "20"), "for its wording alone"),
        (("--length", "1100"), "reads 1,024, so use a smaller length"),
        (("--json", "."), "is a folder; name a file"),
        (("--model", "./nothing-here"), "unknown model './nothing-here'"),
    ],
)
def test_eval_refuses(
    more: tuple[str, ...], sentence: str, options: tuple[object, ...], tmp_path: Path
) -> None:
    policy = () if "--policy" in more else ("--policy", "full")
    base = ("eval", *options, "--task", "needle", "--json", tmp_path / "out.json", *policy)
    assert sentence in refused(*base, *more)
    assert not (tmp_path / "out.json").exists()


def test_eval_needs_policies_a_task_and_a_file(tmp_path: Path) -> None:
    json_file = ("--json", tmp_path / "out.json")
    assert "--task" in refused("eval", "--policy", "k8v4", *json_file)
    assert "--policy" in refused("eval", "--task", "nll", *json_file)
    assert "--json" in refused("eval", "--policy", "k8v4", "--task", "nll")


def test_eval_refuses_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "out.json"
    said = refused("eval", "--policy", "full", "--task", "nll", "--json", path)
    assert "cannot be written" in said


def test_the_choices_are_those_of_the_tasks() -> None:
    assert tuple(Task) == TASKS
    assert tuple(Where) == (*SETTINGS, "both")


# all

COMMANDS = ("demo", "doctor", "eval", "generate", "inspect", "policies", "report")


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_says_what_there_is(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom kv_serve.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy imports'\n"
    )
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, option], check=True, capture_output=True)


def test_commands_without_arguments_show_help() -> None:
    for output in (run().output, run("--help").stdout):
        for command in ("Usage", *COMMANDS):
            assert command in output


@pytest.mark.parametrize(
    "words", [("policies",), ("policies", "snapkv"), ("--help",), ("--version",), ("serve", "-h")]
)
def test_a_reader_that_has_enough_ends_a_command_quietly(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_unread(monkeypatch, *words) == 1
    assert capfd.readouterr().err == ""


def test_a_generation_that_nobody_reads_ends_quietly(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_unread(monkeypatch, "generate", "--model", folder, "Hello") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_eval_goes_on_where_nobody_reads_its_remarks(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    reading, writing = os.pipe()
    os.close(reading)
    with monkeypatch.context() as patch, os.fdopen(writing, "w") as unread:
        patch.setattr(sys, "stderr", unread)
        words = ("eval", *options, "--policy", "full", "--task", "nll", "--json", path)
        patch.setattr(sys, "argv", ["kv-serve", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
    assert not left.value.code
    assert path.is_file()


def test_eval_keeps_its_samples_where_a_result_cannot_be_written(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"

    def full_disk(self: object, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("kv_eval.evaluate.report.Report.write", full_disk)
        result = run("eval", *options, "--policy", "full", "--task", "nll", "--json", path)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"{path} cannot be written: No space left on device; the samples are saved in" in said
    assert (tmp_path / "out.json.partial").is_file()


def test_eval_refuses_a_folder_in_the_journals_place(
    options: tuple[object, ...], tmp_path: Path
) -> None:
    (tmp_path / "out.json.partial").mkdir()
    path = tmp_path / "out.json"
    result = run("eval", *options, "--policy", "full", "--task", "nll", "--json", path)
    assert result.exit_code == 2
    assert "out.json.partial cannot be read: Is a directory" in " ".join(result.stderr.split())
