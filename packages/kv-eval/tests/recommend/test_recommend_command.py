"""`kv-serve recommend --measure`: it searches, resumes, writes a result and says what it found."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import kv_eval.recommend.search as searching
from kv_eval.cli.recommend import search
from kv_eval.evaluate.journal import Finished
from kv_eval.report.read import read
from kv_eval.tasks import Text
from kv_policy import parse
from kv_transformers import search as searches
from kv_transformers.capacity import ModelMemory
from kv_transformers.cli.recommend import recommend
from kv_transformers.models import LoadedModel

TRIED = ("k8v8", "k8v4", "k4v4", "k4v2", "k2v2")


@pytest.fixture(autouse=True)
def supplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supply the search whether or not this version's entry point is installed."""
    monkeypatch.setattr(searches, "installed", lambda: search)


@pytest.fixture
def text_file(text: Text, tmp_path: Path) -> Path:
    path = tmp_path / "plain.txt"
    path.write_text(text.body)
    return path


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(recommend)
    return made


def run(folder: Path, text: Path, out: Path, *more: object, numbers: int = 0) -> Result:
    given = ("--measure", "--json", out, "--text", text, "--context", 512, "--length", 180)
    sizes = ("--continuation", 3, "--windows", 6, "--numbers", numbers, "--device", "cpu")
    words = [str(each) for each in (folder, *given, *sizes, *more)]
    return CliRunner().invoke(app(), words)


def said(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def test_a_policy_within_the_loss_is_recommended(
    folder: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    policies = [option for spec in TRIED for option in ("--policy", spec)]
    result = run(folder, text_file, out, *policies, "--loss", 1000)
    assert result.exit_code == 0, result.output
    words = said(result)
    assert "5 policies, of which 5 support the model and 5 fit." in words
    assert "Use: k2v2 " in words  # the fewest bytes
    assert "It loses at most 1000" in words or "It loses nothing" in words
    assert "Next-token distributions diverge from the full cache's by " in words
    assert f"kv-serve serve {folder} --policy k2v2 --max-model-len 512" in words
    (source,) = read([out])
    rows = {row.policy: row for row in source.report.rows}
    assert [*rows] == ["full", *TRIED]
    assert rows["k2v2"].samples == 6
    assert all(row.divergence is not None for name, row in rows.items() if name != "full")
    assert [path.name for path in tmp_path.iterdir() if "found" in path.name] == ["found.json"]


def test_what_does_not_fit_is_not_tried(
    folder: Path, loaded: LoadedModel, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    memory = ModelMemory.of(loaded.model)
    small, large = (memory.under(parse(spec), 512).request_bytes for spec in ("k2v2", "k8v8"))
    room = ("--per-request", f"{(small + large) // 2}B")
    result = run(folder, text_file, out, "--policy", "k8v8,k2v2", *room)
    assert "2 policies, of which 2 support the model and 1 fit." in said(result), result.output
    assert {row.policy for row in read([out])[0].report.rows} == {"full", "k2v2"}
    few = run(folder, text_file, out, "--policy", "k8v8,k2v2", "--per-request", "1KiB")
    assert few.exit_code == 2
    assert "the smallest of 2 is k2v2" in said(few)


def test_nothing_is_recommended_where_all_lose_too_much(
    folder: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    result = run(folder, text_file, out, "--policy", "k2v2,k2v1", "--loss", 0)
    assert result.exit_code == 1, result.output
    words = said(result)
    assert "No recommendation: of 2 policies that fit, none is shown to lose no more" in words
    assert "It is not shown to lose at most 0:" in words
    assert "kv-serve serve" not in words


def test_numbers_are_asked_for_at_the_end(folder: Path, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    more = ("--policy", "k8v4", "--loss", 1000)
    long = ("--length", 400)
    result = run(folder, text_file, out, *more, *long, numbers=2)
    assert result.exit_code == 0, result.output
    words = said(result)
    assert "needle, asked in the prompt: 0 of 2 numbers found, the full cache 0" in words
    tasks = [(row["task"], row["policy"]) for row in json.loads(out.read_text())["rows"]]
    assert tasks == [(t, p) for t in ("nll", "needle", "multikey") for p in ("full", "k8v4")]
    later = run(folder, text_file, out, *more, *long, "--later", numbers=2)
    assert "needle, asked later: 0 of 2 numbers found" in said(later), later.output


def test_an_interrupted_search_goes_on(
    folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "found.json", tmp_path / "whole.json"
    more = ("--policy", ",".join(TRIED), "--loss", 1000)
    real = searching.run_samples
    left = 9

    def some(*arguments: object, **options: object) -> Iterator[Finished]:
        nonlocal left
        for entry in real(*arguments, **options):
            yield entry
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(searching, "run_samples", some)
        result = run(folder, text_file, out, *more)
    assert result.exit_code == 130, result.output
    assert "samples are finished and saved in" in said(result)
    assert not out.exists()
    result = run(folder, text_file, out, *more)
    assert result.exit_code == 0, result.output
    assert "Resuming from" in said(result)
    again = run(folder, text_file, whole, *more)
    assert again.exit_code == 0, again.output

    def rows(path: Path) -> list[dict[str, object]]:
        found = json.loads(path.read_text())["rows"]
        return [{key: row[key] for key in row if key != "seconds"} for row in found]

    assert rows(out) == rows(whole)
    assert result.stdout.replace(str(out), "") == again.stdout.replace(str(whole), "")


def test_what_is_wrong_with_the_input_is_said(
    folder: Path, text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found.json"
    result = run(folder, text_file, out, "--policy", "k9v9")
    assert (result.exit_code, "unknown policy" in said(result)) == (2, True)
    result = run(folder, tmp_path / "no.txt", out, "--policy", "k8v4")
    assert (result.exit_code, "cannot read the text" in said(result)) == (2, True)
    result = run(folder, text_file, out, "--policy", "k8v4", "--length", 1023, "--context", 1024)
    assert (result.exit_code, "use a smaller length" in said(result)) == (2, True), result.output
