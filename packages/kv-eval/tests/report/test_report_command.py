"""`kv-serve report`: what it writes, and what it refuses with a sentence."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kv_eval.extras as extras
from kv_eval.evaluate.journal import Journal
from kv_policy.files import write_whole
from kv_policy.installing import install_command
from kv_serve.cli import app
from result_files import report, row, tree


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)
    return " ".join(plain.replace("│", " ").split())


@pytest.fixture
def result_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.json"
    report(row("full", 1, 1000, seconds=2.0), row(r"$\x{$ _", 0.5, 400, seconds=1.0)).write(path)
    return path


def test_it_writes_a_page(result_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(result_file.parent)
    done = run("a.json")
    assert done.exit_code == 0, done.output
    assert "Written to report.html." in done.stderr
    html = tree((result_file.parent / "report.html").read_bytes())
    assert [section["id"] for section in html.all("section")] == ["quality", "run"]
    assert sorted(p.name for p in result_file.parent.iterdir()) == ["a.json", "report.html"]


def test_it_reads_several_files(result_file: Path, tmp_path: Path) -> None:
    report(row("k4v2", 0.5, 250)).write(tmp_path / "b.json")
    out = tmp_path / "new" / "page.html"
    done = run(result_file, tmp_path / "b.json", "--out", out)
    assert done.exit_code == 0, done.output
    labels = tree(out.read_bytes()).all("g", class_="role-legend-label")
    assert [label.text for label in labels][:2] == ["a.json", "b.json"]


def test_it_draws_pictures(result_file: Path, tmp_path: Path) -> None:
    png, svg = tmp_path / "f.png", tmp_path / "f.svg"
    command = (result_file, "--out", tmp_path / "p.html", "--png", png, "--svg", svg)
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    drawn = svg.read_bytes()
    assert drawn.rstrip().endswith(b"</svg>")
    assert rb"2  $\x{$ _" in drawn
    first = png.read_bytes()
    assert run(*command).exit_code == 0
    assert (png.read_bytes(), svg.read_bytes()) == (first, drawn)


@pytest.mark.parametrize("absent", ["altair", "vl_convert"])
def test_without_what_draws_charts_a_page_is_refused(
    result_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == absent else True)
    out = tmp_path / "p.html"
    said = refused(result_file, "--out", out)
    assert "a report needs Altair with vl-convert, which draw charts: `" in said
    assert install_command("altair[save]>=6") in said
    assert not out.exists()


def test_what_cannot_be_read_is_refused_and_nothing_written(
    result_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    report(row("full", 1, 1000), model="large").write(tmp_path / "large.json")
    out = tmp_path / "new" / "p.html"
    assert "bad.json is not a result of `kv-serve eval`" in refused(
        result_file, tmp_path / "bad.json", "--out", out
    )
    assert "large.json is of the model large, but" in refused(
        result_file, tmp_path / "large.json", "--out", out
    )
    assert "missing.json cannot be read" in refused(tmp_path / "missing.json", "--out", out)
    assert "Missing argument 'FILE'" in refused("--out", out)
    assert not out.parent.exists()


def test_places_that_cannot_be_written_are_refused(result_file: Path, tmp_path: Path) -> None:
    out, before = tmp_path / "p.html", result_file.read_bytes()
    assert f"--out {tmp_path} is a folder" in refused(result_file, "--out", tmp_path)
    under = result_file / "p.html"
    assert f"--svg {under} cannot be written" in refused(result_file, "--out", out, "--svg", under)
    said = refused(result_file, "--out", out, "--png", tmp_path / "." / "p.html")
    assert "--png and --out both name" in said
    assert "which is a result to read" in refused(result_file, "--out", result_file)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert "symbolic links" in refused(result_file, "--out", circle)
    assert "symbolic links" in refused(circle, circle, "--out", out)
    assert not out.exists()
    assert result_file.read_bytes() == before


def test_an_older_page_stays_whole_when_writing_fails(
    result_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "p.html"
    out.write_text("something older")

    def full_disk(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    assert "p.html cannot be written: No space left" in refused(result_file, "--out", out)
    assert out.read_text() == "something older"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "p.html"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for data in (b"one", b"another"):
        write_whole(path, data)
        assert path.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_journal_says_how_to_finish_it(result_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.json.partial"
    Journal.start(path, {"model": "tiny"})
    said = refused(path, "--out", tmp_path / "p.html")
    assert f"{path} holds the samples of an evaluation that has not finished; run the same" in said
    assert f"report on {tmp_path / 'x.json'}" in said
    moved = path.rename(tmp_path / "moved")
    assert "has not finished" in refused(result_file, moved, "--out", tmp_path / "p.html")


@pytest.mark.parametrize("data", [b'{"model": "\xff"}', b"[" * 100_000, b'{"kept":' * 100_000])
def test_a_result_of_no_known_form_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    said = refused(tmp_path / "x.json", "--out", tmp_path / "p.html")
    assert "x.json is not a result of `kv-serve eval`: " in said
