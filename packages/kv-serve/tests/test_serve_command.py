"""`kv-serve serve` rejects invalid arguments before vLLM is imported."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kv_serve.cli import app
from kv_serve.vllm import versions


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    be(monkeypatch, "0.32.0")


def be(patch: pytest.MonkeyPatch, version: str | None) -> None:
    patch.setattr(versions, "installed", lambda: version)


def test_an_unknown_policy_is_refused_first() -> None:
    assert "unknown policy 'magic'; installed policies: " in refused("m", "--policy", "magic")


def test_a_spec_that_says_two_things_is_refused() -> None:
    said = refused("m", "--max-model-len", "128", "--policy=k8v4+k4v2")
    assert "k8v4 and k4v2 both define how tokens are stored" in said


@pytest.mark.parametrize("policy", [(), ("--policy", "k8v4")])
def test_without_vllm_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, policy: tuple[str, ...]
) -> None:
    be(monkeypatch, None)
    assert "vLLM is not installed; install kv-serve into" in refused("m", *policy)


@pytest.mark.parametrize("version", ["0.28.3", "0.34.0", "unknown"])
def test_another_version_of_vllm_serves_no_policy(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    be(monkeypatch, version)
    said = refused("m", "--policy", "k8v4")
    assert f"policies need vLLM 0.29 to 0.33, but vLLM {version} is installed" in said


def test_a_checkout_says_how_to_get_a_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    be(monkeypatch, None)
    monkeypatch.setattr(
        "kv_policy.installing.checkout_of", lambda name: tmp_path / "packages" / name
    )
    arguments = ("m", "--max-model-len", "128", "--policy", "k8v4")
    assert "nox" not in refused(*arguments)
    (tmp_path / "noxfile.py").write_text("")
    command = f"`cd {tmp_path} && python -m nox -s serve -- {' '.join(arguments)}`"
    assert command in refused(*arguments)


@pytest.mark.parametrize("policy", ["leankv:profile=no where", "zack:file=no where,rate=0.3"])
def test_what_calibrates_is_said_for_the_model(policy: str) -> None:
    name = policy.partition(":")[0]
    command = f"kv-serve calibrate {name} --model ./m --out 'no where'"
    said = refused("./m", "--policy", policy)
    assert said.endswith(f"{name}: no where does not exist; write it with `{command}`")


def test_a_model_comes_first() -> None:
    assert "name a model first" in refused()
    assert "name a model first" in refused("--policy", "k8v4")


def test_a_model_that_is_nowhere_is_refused() -> None:
    assert "unknown model './nowhere'" in refused("./nowhere", "--policy", "k8v4")
    said = refused("package:no-such-package")
    assert "needs the package 'no-such-package', which is not installed" in said


@pytest.mark.parametrize(
    ("version", "served"),
    [
        *(("0.29.0", True), ("0.30.0", True), ("0.31.1rc2", True), ("0.33.0+cpu", True)),
        *(("0.28.9", False), ("0.34.0", False), ("1.0", False), ("dev", False)),
    ],
)
def test_versions_that_are_served(version: str, served: bool) -> None:
    assert versions.is_served(version) == served
