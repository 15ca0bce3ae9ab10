"""Commands fold a policy's basis into the model that they have to themselves, where they can."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import kv_transformers.from_text as caches
from kv_eval import demo
from kv_eval.tasks import Text
from kv_serve.cli import app
from kv_transformers.fitted import WrongModelError
from kv_transformers.fold import folded_by
from kv_transformers.from_text import folded
from kv_transformers.models import LoadedModel
from statistics_files import write

KEYS_ONLY = "keys only, which a rotary embedding keeps from being folded"


@pytest.fixture(scope="module")
def made(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of the tiny model, from a short text of any characters."""
    return write(loaded, tmp_path_factory.mktemp("found") / "found", loaded.fingerprint)


def zack(path: Path, rate: float = 0.0) -> str:
    return f"zack:file={path},rate={rate},multiple=1"


def generate(folder: Path, spec: str) -> Result:
    command = ["generate", "--model", str(folder), "--max-new-tokens", "12", "Hello there"]
    return CliRunner().invoke(app, [*command, "--policy", spec])


def test_a_basis_is_folded_for_the_length_of_a_block(loaded: LoadedModel, made: Path) -> None:
    model = loaded.model
    with folded(model, zack(made)) as reason:
        assert reason is None
        assert folded_by(model) is not None
    assert folded_by(model) is None
    with pytest.raises(KeyboardInterrupt), folded(model, zack(made)):
        raise KeyboardInterrupt
    assert folded_by(model) is None


def test_what_has_no_basis_or_cannot_be_folded_leaves_the_model(
    loaded: LoadedModel, made: Path
) -> None:
    for spec, sentence in (
        ("full", None),
        ("k8v4", None),
        (f"think:file={made},rate=0.5", KEYS_ONLY),
    ):
        with folded(loaded.model, spec) as reason:
            assert folded_by(loaded.model) is None
        assert (reason is None) if sentence is None else sentence in reason


def test_a_basis_of_another_model_is_an_error(loaded: LoadedModel, tmp_path: Path) -> None:
    path = write(loaded, tmp_path / "other", "0123456789abcdef")
    with (
        pytest.raises(WrongModelError, match="calibrated with the model 0123456789abcdef"),
        folded(loaded.model, zack(path)),
    ):
        pass
    result = generate(Path(loaded.name), zack(path))
    assert result.exit_code == 2
    assert "calibrated with the model 0123456789abcdef" in result.stderr


def test_generate_folds(folder: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, make = [], caches.make_cache

    def noting(model, spec: str, **options: str):
        found.append(folded_by(model))
        return make(model, spec, **options)

    monkeypatch.setattr(caches, "make_cache", noting)
    raw = generate(folder, "raw")
    basis = generate(folder, zack(made))
    assert basis.exit_code == 0, basis.output
    assert basis.stdout == raw.stdout != ""  # nothing is lost at full rank
    assert found[0] is None
    assert found[1].what == {"values"}
    assert "not folded" not in basis.stderr


def test_generate_goes_on_unfolded_with_a_remark(folder: Path, made: Path) -> None:
    result = generate(folder, f"think:file={made},rate=0.5")
    assert result.exit_code == 0, result.output
    assert result.stdout
    said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.stderr).split())
    assert said.count("The basis is not folded into the model: ") == 1
    assert KEYS_ONLY in said


def test_the_demo_folds(loaded: LoadedModel, text: Text, made: Path) -> None:
    show, said, found = demo.Show(loaded, text, 300), [], []

    def noting(model, spec: str):
        found.append(folded_by(model) is not None)
        return caches.make_cache(model, spec)

    think = f"think:file={made},rate=0.5"
    full, basis, keys = show.run(("full", zack(made), think), noting, said.append)
    assert found == [False] * 2 + [True] * 2 + [False] * 2  # the prompt, and a chat
    assert (basis.needle, basis.chat) == (full.needle, full.chat)
    assert len(said) == 1
    assert said[0].startswith(think)
    assert KEYS_ONLY in said[0]
    assert keys.policy == think
