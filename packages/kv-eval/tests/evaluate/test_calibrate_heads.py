"""`kv-serve calibrate heads`: what it reads, writes and refuses, and how it resumes."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from calibrating import calibrated, said
from kv_eval.calibrate.partial import Partial
from kv_eval.calibrate.random_tokens import REPEATS, RandomTokens, digest
from kv_evict.heads_file import load
from kv_policy import parse
from kv_transformers import CompressedCache, passing
from kv_transformers.fitted import WrongModelError
from kv_transformers.models import LoadedModel

run = partial(calibrated, "heads")


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> list[object]:
    return ["--model", folder, "--out", tmp_path / "found", "--period", 40]


def test_it_writes_scores_that_compress(
    options: list[object], loaded: LoadedModel, tmp_path: Path
) -> None:
    result = run(*options)
    assert result.exit_code == 0, result.output
    facts = load("razor", str(tmp_path / "found")).facts
    assert (facts.fingerprint, facts.period) == (loaded.fingerprint, 40)
    assert facts.text == "random tokens, repeated 4 times, seed 0"
    assert [p.name for p in tmp_path.iterdir()] == ["found"]
    for shown in ("layer", "induction", "echo", "loss"):
        assert shown in result.stdout
    assert "razor:file=" in said(result)
    options_of = f"file={tmp_path / 'found'},share=0.5,sinks=2,recent=20"
    for text in (f"razor:{options_of},part=0.0,echo=0.0", f"duo:{options_of}"):
        cache = CompressedCache(loaded.model, parse(text))
        ids = torch.randint(3, 50, (1, 90), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            loaded.model(ids[:, :80], **passing(loaded.model, cache))
            for i in range(80, 90):
                loaded.model(ids[:, i : i + 1], **passing(loaded.model, cache))
        held = cache.memory().tokens.flatten()
        whole = -(-held.numel() // 2)
        assert sorted(held.tolist()) == [22] * (held.numel() - whole) + [90] * whole


def test_the_scores_as_json(options: list[object], tmp_path: Path) -> None:
    result = run(*options, "--json", "--windows", 2)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["bytes"] == (tmp_path / "found").stat().st_size
    stored = load("duo", str(tmp_path / "found"))
    assert found["tokens"] == stored.facts.tokens
    assert set(found["scores"]) == {"induction", "echo", "loss"}
    for kind, score in stored.scores.items():
        assert torch.equal(torch.tensor(found["scores"][kind]), score)


def test_going_on_gives_the_same_file_bit_for_bit(
    options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*options).exit_code == 0
    whole = (tmp_path / "found").read_bytes()
    (tmp_path / "found").unlink()
    save = Partial.save

    def interrupted(self: Partial, calibrator: object) -> None:
        save(self, calibrator)
        if self.windows == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "save", interrupted)
        result = run(*options)
    assert result.exit_code == 130
    assert sorted(p.name for p in tmp_path.iterdir()) == ["found.partial"]
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert "Resuming from" in said(result)
    assert (tmp_path / "found").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--period", 9), "a period of 9 tokens was given; use at least 16"),
        (("--windows", 0), "0 windows were requested; use at least 1"),
        (("--period", 100_000), "has room for 4 of 16 to"),
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
        CompressedCache(loaded.model, f"duo:file={tmp_path / 'found'}")


def test_windows_repeat_their_own_tokens(loaded: LoadedModel) -> None:
    drawn = RandomTokens(period=30, windows=3, seed=1)
    windows = drawn.drawn(loaded)
    special = set(loaded.tokenizer.all_special_ids)
    for window in windows:
        ids = window[0].tolist()
        tokens = ids[len(ids) % 30 :]
        assert len(tokens) == 30 * REPEATS
        assert tokens == tokens[:30] * REPEATS
        assert not special & set(tokens)
    assert len({digest((window,)) for window in windows}) == 3
    assert digest(windows) == digest(drawn.drawn(loaded))
    assert digest(windows) != digest(RandomTokens(period=30, windows=3, seed=2).drawn(loaded))
