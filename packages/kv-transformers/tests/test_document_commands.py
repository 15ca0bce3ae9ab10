"""`compress` writes a document that `generate --document` answers from."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import tiny_model
from kv_transformers.cli.compress import compress
from kv_transformers.cli.generate import generate

BOOK = "The harbour was quiet that morning, and the boats lay still. " * 4
APP = typer.Typer()
APP.command("compress")(compress)
APP.command("generate")(generate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("commands") / "model")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(f"{BOOK}\n")
    return tmp_path / "book.txt"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(a) for a in arguments])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("options", [(), ("--raw",), ("--private",)])
def test_a_question_is_answered_as_behind_the_text(folder, book, tmp_path, options) -> None:
    file = tmp_path / "book.kv"
    given = ("--policy", "raw", "-o", file)
    found = run("compress", folder, book, *given, *options)
    assert found.exit_code == 0, found.output
    assert "tokens in" in found.stderr
    raw = ("--raw",) if "--raw" in options else ()
    tail = ("--model", folder, "--max-new-tokens", 8, *raw)
    got = run("generate", *tail, "--document", file, "Who lay still?")
    assert got.exit_code == 0, got.output
    want = run("generate", *tail, "--policy", "raw", f"{BOOK.strip()}\n\nWho lay still?")
    assert got.stdout == want.stdout != ""


def test_what_a_document_cannot_be_asked_with_is_refused(folder, book, tmp_path) -> None:
    file = tmp_path / "book.kv"
    run("compress", folder, book, "-o", file, "--policy", "k8v4")
    tail = ("generate", "--model", folder, "--document", file, "Who?")
    assert "is under the policy k8v4, but raw was given" in refused(*tail, "--policy", "raw")
    assert "`full` is none" in refused(*tail, "--policy", "full")
    assert "compressed as the begin of a chat" in refused(*tail, "--raw")
    missing = refused("generate", "--document", tmp_path / "none.kv", "Who?")
    assert "does not exist; write one with `kv-serve compress MODEL TEXT --out FILE`" in missing
    assert "supports 1,024 in total" in refused(*tail, "--max-new-tokens", 2000)


def test_what_cannot_be_compressed_is_refused(folder, book, tmp_path) -> None:
    file = tmp_path / "book.kv"
    end = ("-o", file)
    assert "transformers' own cache" in refused("compress", folder, book, *end, "--policy", "full")
    (tmp_path / "empty.txt").write_text(" \n")
    assert "is empty" in refused("compress", folder, tmp_path / "empty.txt", *end)
    (tmp_path / "long.txt").write_text("a" * 2000)
    assert "shorten the document" in refused("compress", folder, tmp_path / "long.txt", *end)
    assert "is a folder" in refused("compress", folder, book, "-o", tmp_path)
    assert not file.exists()
