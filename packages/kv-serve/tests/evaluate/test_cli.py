"""The commands, as somebody types them."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_serve.cli import app


def run(*arguments: str, expect: int = 0, **options: str) -> tuple[str, str]:
    """Run a command; give standard output and standard error without colours and line breaks."""
    result = CliRunner().invoke(app, arguments, **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == expect, result.output
    return result.stdout, " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.stderr).split())


def test_policies_are_listed_with_their_sources() -> None:
    listed, _ = run("policies")
    for name in ("raw", "k8v4", "k2v4", "streaming", "snapkv"):
        assert re.search(rf"^\s*{name}\s", listed, re.MULTILINE), name
    assert "SnapKV, Li et al., 2024" in listed


def test_one_policy_is_shown_with_its_parameters() -> None:
    shown, _ = run("policies", "snapkv")
    for word in ("budget", "1024", "window", "32", "pool", "21", "group"):
        assert word in shown


def test_an_unknown_policy_lists_the_installed_ones() -> None:
    _, said = run("policies", "magic", expect=2)
    assert "no policy is called 'magic'" in said
    assert "snapkv" in said


def test_generate_streams_text_and_says_what_the_cache_holds(folder: Path) -> None:
    ask = ("generate", "--model", str(folder), "--policy", "k8v4", "--max-new-tokens", "7", "Hello")
    text, said = run(*ask)
    assert len(text.rstrip("\n")) <= 7
    assert re.search(r"k8v4: [\d,]+ bytes of KV cache held, 0\.\d+ of the full", said)
    assert run(*ask)[0] == text


def test_generate_reads_a_prompt_from_a_file_and_standard_input(
    folder: Path, tmp_path: Path
) -> None:
    common = ("generate", "--model", str(folder), "--max-new-tokens", "5", "--raw")
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time")
    given, _ = run(*common, "Once upon a time")
    assert run(*common, "--prompt-file", str(file))[0] == given
    assert run(*common, "--prompt-file", "-", input="Once upon a time")[0] == given


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("  ",), "the prompt is empty"),
        (("--prompt-file", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--policy", "k9v9", "hi"), "no policy is called 'k9v9'"),
        (("--policy", "snapkv:budget=8", "hi"), "smaller than the 32 it protects"),
        (("--policy", "snapkv:budget=lots", "hi"), "budget 'lots' is not understood"),
        (("--max-new-tokens", "5000", "hi"), "reads 1,024 together"),
    ],
)
def test_generate_refuses_with_a_sentence(
    folder: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    text, said = run("generate", "--model", str(folder), *arguments, expect=2)
    assert text == ""
    assert sentence in said


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    _, said = run("generate", "--model", str(tmp_path / "none"), "hi", expect=2)
    assert "none" in said


def evaluation(folder: Path, text_file: Path, result: Path, *more: str) -> tuple[str, ...]:
    options = {
        "--model": folder,
        "--text": text_file,
        "--json": result,
        "--samples": 2,
        "--length": 200,
        "--seed": 3,
        "--continuation": 8,
    }
    flags = [str(x) for pair in options.items() for x in pair]
    return ("eval", *flags, *more)


def test_eval_writes_the_rows_and_is_deterministic(
    folder: Path, text_file: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    more = ("--task", "nll", "--task", "agreement", "--policy", "raw,streaming:budget=64,sinks=2")
    for file in (first, second):
        run(*evaluation(folder, text_file, file, *more))
    found = json.loads(first.read_text())
    assert set(found) == {"model", "commit", "versions", "rows"}
    keys = "policy task setting length samples seed score full_score kv_bytes full_bytes seconds"
    for row in found["rows"]:
        assert set(row) == set(keys.split())
    scores = {(r["policy"], r["task"]): r["score"] for r in found["rows"]}
    assert scores["raw", "agreement"] == 1.0
    assert scores["raw", "nll"] == pytest.approx(scores["full", "nll"], abs=1e-5)
    assert {policy for policy, _ in scores} == {"full", "raw", "streaming:budget=64,sinks=2"}
    again = json.loads(second.read_text())

    def timeless(rows: list[dict]) -> list[dict]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    assert timeless(again["rows"]) == timeless(found["rows"])
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--task", "nll", "--policy", "magic"), "no policy is called 'magic'"),
        (("--task", "nll", "--policy", "raw,raw"), "named twice"),
        (("--task", "nll", "--policy", "raw,,k8v4"), "empty place"),
        (("--task", "nll", "--setting", "aware", "--policy", "raw"), "no setting `aware`"),
    ],
)
def test_eval_refuses_with_a_sentence(
    folder: Path, text_file: Path, tmp_path: Path, more: tuple[str, ...], sentence: str
) -> None:
    _, said = run(*evaluation(folder, text_file, tmp_path / "r.json", *more), expect=2)
    assert sentence in said
    assert not (tmp_path / "r.json").exists()


@pytest.mark.model
def test_the_demo_writes_its_table(tmp_path: Path) -> None:
    shown, _ = run("demo", "--quick", "--json", str(tmp_path / "demo.json"))
    found = json.loads((tmp_path / "demo.json").read_text())
    policies = [outcome["policy"] for outcome in found["outcomes"]]
    assert policies[:3] == ["full", "k8v4", "k4v2"]
    assert len(policies) == 5
    full, k8v4 = found["outcomes"][:2]
    assert full["needle_right"]
    assert k8v4["needle_right"]
    assert full["ratio"] == 1.0
    assert 104 / 256 < k8v4["ratio"] < 104 / 256 + 0.04
    assert all(policy.split(":")[0] in shown for policy in policies)


def test_help_says_what_each_command_does() -> None:
    shown, _ = run("--help")
    for command in ("demo", "generate", "eval", "policies"):
        assert command in shown
