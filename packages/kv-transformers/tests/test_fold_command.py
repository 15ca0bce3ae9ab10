"""`kv-serve fold` writes a checkpoint, and refuses by a sentence."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import tiny_model
from kv_transformers.cli.console import USER_ERROR
from kv_transformers.cli.fold import fold
from kv_transformers.cli.generate import generate
from noise_statistics import write_statistics

APP = typer.Typer()
APP.command("fold")(fold)
APP.command("generate")(generate)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("command") / "model")


@pytest.fixture(scope="module")
def policy(folder: Path) -> str:
    return f"zack:file={write_statistics(folder, folder.parent / 'zack')},keep=75%,multiple=1"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(a) for a in arguments])


def test_the_checkpoint_answers_as_the_model(folder: Path, policy: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("fold", folder, "--policy", f"{policy}+k8v4", "-o", out)
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    said = " ".join(done.stderr.split())
    assert f"{out} holds the value basis" in said
    assert f"under {policy}+k8v4, and any other share that is kept" in said
    for spec in ("full", policy):
        tail = ("--max-new-tokens", 8, "--policy", spec, "Who lay still?")
        want, got = (run("generate", "--model", each, *tail) for each in (folder, out))
        assert got.exit_code == 0, got.output
        assert got.stdout == want.stdout != ""


def test_what_cannot_be_folded_is_refused(folder: Path, policy: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for arguments, sentence in (
        ((folder, "--policy", "k8v4", "-o", tmp_path / "out"), "k8v4 has no value basis that a"),
        ((folder, "--policy", policy, "-o", tmp_path), "has files in it; name a folder that does"),
        ((folder, "--policy", "no", "-o", tmp_path / "out"), "no"),
        (("./no", "--policy", policy, "-o", tmp_path / "out"), "unknown model './no'"),
        (
            (folder, "--policy", "zack:file=no,keep=75%", "-o", tmp_path / "out"),
            f"kv-serve calibrate zack --model {folder} --out no",
        ),
    ):
        result = run("fold", *arguments)
        assert result.exit_code == USER_ERROR, result.output
        assert sentence in " ".join(result.stderr.split())
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
