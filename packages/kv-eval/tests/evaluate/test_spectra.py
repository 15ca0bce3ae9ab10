"""What an evaluation says of the bases of its policies, and a report shows."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kv_eval.evaluate.report import spectra
from kv_policy import parse
from kv_serve.cli import app
from kv_transformers.models import LoadedModel
from statistics_files import write


@pytest.fixture(scope="module")
def made(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(loaded, tmp_path_factory.mktemp("found") / "found", loaded.fingerprint)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_policies_of_one_basis_have_its_singular_values_once(made: Path) -> None:
    some = [f"zack:file={made},rate={rate},multiple=1" for rate in (0.1, 0.5)]
    found = spectra(["full", "k8v4", *some, f"{some[0]}+k8v4", f"think:file={made}"])
    assert list(found) == [f"zack:file={made}, keys", f"zack:file={made}, values"]
    other = spectra([f"kq-svd:file={made},rate=0.1,multiple=1"])
    assert not found.keys() & other.keys()


def test_they_are_the_basis_own_in_five_digits(made: Path) -> None:
    spec = f"zack:file={made},rate=0.1,multiple=1"
    want = parse(spec).basis.singular_values()
    for name, layers in spectra([spec]).items():
        for layer, heads in zip(want[name].tolist(), layers, strict=True):
            for exact, short in zip(layer, heads, strict=True):
                assert list(short) == pytest.approx(exact, rel=1e-4)
                assert all(value == float(f"{value:.5g}") for value in short)


def test_a_result_has_them_and_a_report_draws_them(
    folder: Path, text_file: Path, made: Path, tmp_path: Path
) -> None:
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    sizes = ("--length", 120, "--samples", 1, "--continuation", 4)
    about = ("--model", folder, "--text", text_file, "--task", "nll", *sizes)
    specs = f"k8v4,zack:file={made},rate=0.2,multiple=1"
    result = run("eval", *about, "--policy", specs, "--json", path)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["spectra"]
    assert {name: len(layers) for name, layers in found.items()} == {
        f"zack:file={made}, {what}": 2 for what in ("keys", "values")
    }
    shown = run("report", path, "--out", page)
    assert shown.exit_code == 0, shown.output
    assert page.read_text().count("Singular values: zack:file=") == 2


def test_without_a_basis_a_result_says_nothing_of_them(
    folder: Path, text_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    sizes = ("--length", 120, "--samples", 1, "--continuation", 4)
    about = ("--model", folder, "--text", text_file, "--task", "nll", *sizes)
    assert run("eval", *about, "--policy", "k8v4", "--json", path).exit_code == 0
    assert "spectra" not in json.loads(path.read_text())
