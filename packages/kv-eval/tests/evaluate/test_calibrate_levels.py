"""`kv-serve calibrate levels`: what it reads, writes and refuses, and how it resumes."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from calibrating import calibrated, said
from kv_eval.calibrate.partial import Partial
from kv_eval.tasks import Text
from kv_policy import parse
from kv_quant.level_file import load, save
from kv_transformers import CompressedCache, passing
from kv_transformers.fitted import WrongModelError
from kv_transformers.models import LoadedModel

run = partial(calibrated, "levels")


@pytest.fixture(scope="module")
def long_file(text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of more than 4096 characters, which are the tokens of the tiny model."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(text.body[:4200])
    return path


@pytest.fixture
def options(folder: Path, long_file: Path, tmp_path: Path) -> list[object]:
    where = ("--model", folder, "--text", long_file, "--out", tmp_path / "found")
    return [*where, "--tokens", 4096, "--window", 512]


def logits(loaded: LoadedModel, policy: str) -> torch.Tensor:
    """Read a prompt and generate some tokens; return the logits of these."""
    cache = CompressedCache(loaded.model, policy)
    ids = torch.randint(3, 50, (2, 30), generator=torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        loaded.model(ids[:, :20], **passing(loaded.model, cache))
        for i in range(20, 30):
            found.append(loaded.model(ids[:, i : i + 1], **passing(loaded.model, cache)).logits)
    return torch.cat(found, 1)


def test_it_writes_levels_that_compress(
    options: list[object], loaded: LoadedModel, tmp_path: Path
) -> None:
    result = run(*options)
    assert result.exit_code == 0, result.output
    found = load("k4v4", str(tmp_path / "found"))
    assert (found.fingerprint, found.tokens) == (loaded.fingerprint, 4096)
    assert (found.text, found.outliers) == ("long.txt", (0, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    for shown in ("outliers", "bits", "keys", "values", "even"):
        assert shown in result.stdout
    assert f"k4v4:levels=fitted,file={tmp_path / 'found'}" in "".join(said(result).split(" "))
    whole, name = logits(loaded, "fp32"), f"levels=fitted,file={tmp_path / 'found'}"
    off = {
        spec: float((logits(loaded, spec) - whole).norm() / whole.norm())
        for spec in (f"k4v4:{name}", f"k4v4:outliers=1,{name}", f"k2v2:{name}")
    }
    four, four_and_outliers, two = off.values()
    assert 0 < four < two
    assert 0 < four_and_outliers < two


def test_the_summary_as_json(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--json", "--outliers", 2, "--outliers", 0)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bytes"] == (tmp_path / "found").stat().st_size
    assert found["tokens"] == 4096
    assert [(row["outliers"], row["bits"]) for row in found["errors"]] == [
        (outliers, bits) for outliers in (0, 2) for bits in (4, 3, 2, 1)
    ]
    for row in found["errors"]:
        assert 0 < row["keys"] <= row["even_keys"]
        assert 0 < row["values"] <= row["even_values"]
    assert load("k4v4", str(tmp_path / "found")).outliers == (0, 2)


def test_going_on_gives_the_same_file_bit_for_bit(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    whole = (tmp_path / "found").read_bytes()
    (tmp_path / "found").unlink()
    save_state = Partial.save

    def interrupted(self: Partial, calibrator: object) -> None:
        save_state(self, calibrator)
        if self.windows == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "save", interrupted)
        result = run(*options)
    assert result.exit_code == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.partial"]
    result = run(*options, "--outliers", 1)
    assert "its settings differ: outliers was [0, 1] and is [1]" in said(result)
    (tmp_path / "found").unlink()
    (tmp_path / "found.partial.aside").rename(tmp_path / "found.partial")
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "Resuming from" in said(result)
    assert (tmp_path / "found").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--tokens", 100), "100 tokens are too few"),
        (("--window", 1), "a window of 1 tokens was given; use at least 2"),
        (("--window", 100_000), "a window of 100,000 tokens was given; "),
        (("--outliers", -1), "outliers are (-1,); give one or more different numbers"),
    ],
)
def test_refusals(options: list[object], arguments: tuple[object, ...], sentence: str) -> None:
    result = run(*options, *arguments)
    assert result.exit_code == 2
    assert sentence in said(result)


def test_another_model_and_other_levels_are_refused(
    options: list[object], loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    file = tmp_path / "found"
    spec = f"k4v4:levels=fitted,file={file}"
    cache = CompressedCache(loaded.model, parse(spec))
    ids = torch.randint(3, 50, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loaded.model(ids, **passing(loaded.model, cache))
    document = tmp_path / "document.kv"
    cache.save(document, ids=ids)
    CompressedCache.load(loaded.model, document)
    found = load("k4v4", str(file))
    first, *rest = found.fits
    other = msgspec.structs.replace(first, keys=tuple(0.9 * level for level in first.keys))
    save(file, msgspec.structs.replace(found, fits=(other, *rest)))
    with pytest.raises(ValueError, match=r"calibration of .* has changed since it was saved"):
        CompressedCache.load(loaded.model, document)
    monkeypatch.setattr("kv_transformers.fitted.fingerprint_of", lambda model: "another")
    with pytest.raises(WrongModelError, match="calibrated with the model"):
        CompressedCache(loaded.model, spec)
