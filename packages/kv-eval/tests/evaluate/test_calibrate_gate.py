"""`kv-serve calibrate gate`: what it reads, writes and refuses, and how it resumes."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from calibrating import calibrated, said
from kv_eval.calibrate.partial import Partial
from kv_eval.calibrate.passages import default_passages, read_passage
from kv_eval.calibrate.repeated import Repetitions
from kv_eval.tasks import Text
from kv_evict.gate_file import load
from kv_policy import parse
from kv_transformers import CompressedCache, passing
from kv_transformers.fitted import WrongModelError
from kv_transformers.models import LoadedModel

run = partial(calibrated, "gate")


@pytest.fixture(scope="module")
def files(text: Text, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two texts; a character is a token of the tiny model."""
    folder = tmp_path_factory.mktemp("text")
    paths = folder / "one.txt", folder / "other.txt"
    for i, path in enumerate(paths):
        path.write_text(text.body[i * 3000 : i * 3000 + 2900])
    return paths


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_evict.gate_fit.STEPS", 50)


@pytest.fixture
def options(folder: Path, files: tuple[Path, Path], tmp_path: Path) -> list[object]:
    texts = [each for path in files for each in ("--text", path)]
    where = ("--model", folder, *texts, "--out", tmp_path / "found")
    return [*where, "--tokens", 4096, "--window", 200]


def test_it_writes_a_gate_that_compresses(
    options: list[object], loaded: LoadedModel, tmp_path: Path
) -> None:
    result = run(*options)
    assert result.exit_code == 0, result.output
    facts = load(str(tmp_path / "found")).facts
    assert (facts.fingerprint, facts.window, facts.text) == (
        loaded.fingerprint,
        200,
        "one.txt other.txt",
    )
    assert facts.tokens == 11 * 2 * 200
    assert set(facts.overlap) == {"0.5", "0.25", "0.125"}
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    for shown in ("one.txt", "other.txt", "layer 1", "of 12.5%"):
        assert shown in result.stdout
    assert "gate:file=" in said(result)
    policy = parse(f"gate:file={tmp_path / 'found'},budget=40,layers=even")
    cache = CompressedCache(loaded.model, policy)
    ids = torch.randint(3, 50, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loaded.model(ids, **passing(loaded.model, cache))
    assert cache.memory().tokens.float().mean() <= 40
    assert cache.memory().tokens.sum() < 90 * cache.memory().tokens.numel()


def test_the_summary_as_json(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["tokens"] == 4400
    assert found["bytes"] == (tmp_path / "found").stat().st_size
    assert set(found["overlap"]) == {"one.txt", "other.txt"}
    assert len(found["overlap_by_layer"]) == 2
    mean = sum(each["0.25"] for each in found["overlap"].values()) / 2
    assert load(str(tmp_path / "found")).facts.overlap["0.25"] == pytest.approx(mean, abs=1e-4)
    # A quarter of the tokens chosen at random would have an overlap of a quarter.
    assert mean > 0.4


def test_going_on_gives_the_same_file_bit_for_bit(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    whole = (tmp_path / "found").read_bytes()
    (tmp_path / "found").unlink()
    save, count = Partial.save, []

    def interrupted(self: Partial, calibrator: object) -> None:
        save(self, calibrator)
        count.append(self.windows)
        if len(count) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Partial, "save", interrupted)
    result = run(*options)
    assert result.exit_code == 130
    assert "run the same command again to resume" in said(result)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.partial"]
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "after 3,200 tokens" in said(result)
    assert (tmp_path / "found").read_bytes() == whole


@pytest.mark.parametrize(
    "where", ["gate_calibration.GateEvaluation.see", "gate_fit.NetworkFit.run"]
)
def test_an_interrupted_fit_or_comparison_resumes(
    where: str, options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"kv_evict.{where}", stopped)
        result = run(*options)
    assert result.exit_code == 130
    assert "The collected state is saved in" in said(result)
    assert [p.name for p in tmp_path.iterdir()] == ["found.partial"]
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "after 4,400 tokens" in said(result)
    assert [p.name for p in tmp_path.iterdir()] == ["found"]


def test_texts_of_one_name_are_refused(
    options: list[object], files: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other" / "one.txt"
    other.parent.mkdir()
    other.write_text(files[1].read_text())
    result = run(*options, "--text", other)
    assert result.exit_code == 2
    assert "2 texts are named one.txt; give each file a name of its own" in said(result)


def test_texts_of_an_installation_are_the_same_in_every_process() -> None:
    mine = {p.name: p.digest for p in default_passages()}
    code = (
        "import xml.dom, torch, typing_extensions\n"
        "from kv_eval.calibrate.passages import default_passages\n"
        "print({p.name: p.digest for p in default_passages()})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(mine)
    assert set(mine) == {"documentation", "code", "dialogue", "records"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tokens", 4000), "4,000 tokens are too few"),
        (("--window", 20), "a window of 20 tokens was given; use at least 64"),
        (("--text", "/nowhere/text"), "cannot read the text /nowhere/text"),
        (("--window", 100_000), "has room for"),
        (("--tokens", 50_000), "are needed of each of the texts"),
    ],
)
def test_refusals(options: list[object], arguments: tuple[object, ...], sentence: str) -> None:
    result = run(*options, *arguments)
    assert result.exit_code == 2
    assert sentence in said(result)


def test_another_model_is_refused(
    options: list[object], loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    monkeypatch.setattr("kv_transformers.fitted.fingerprint_of", lambda model: "another")
    with pytest.raises(WrongModelError, match="calibrated with the model"):
        CompressedCache(loaded.model, f"gate:file={tmp_path / 'found'},budget=40")


def test_windows_hold_the_text_twice(loaded: LoadedModel, files: tuple[Path, Path]) -> None:
    repetitions = Repetitions(4096, 200)
    middle = repetitions.instruction(loaded)
    windows, others = repetitions.windows(loaded, [read_passage(path) for path in files])
    assert len(windows) == 22
    for window in (*windows, *others.values()):
        ids = window[0].tolist()
        assert ids[:200] == ids[200 + len(middle) :]
        assert ids[200 : 200 + len(middle)] == middle
    assert not any(torch.equal(w, o) for w in windows for o in others.values())
