"""The state of a calibration on disk: damaged files are set aside, and nothing of them is used."""

import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

from damaged import mutated
from kv_eval.calibrate.partial import Partial, read_state
from kv_policy import Calibrated

ASKED = {"model": "tiny", "tokens": 4096}


class Counting:
    """A calibrator that has seen some tokens."""

    def __init__(self, tokens: int = 0) -> None:
        self._state = {"moments": torch.full((2, 3), tokens / 7), "tokens": torch.tensor([tokens])}

    @property
    def tokens(self) -> int:
        return int(self._state["tokens"])

    def see(self, layer: int, query: object, key: object, value: object, there: object) -> None:
        raise AssertionError

    def state(self) -> dict[str, Tensor]:
        return self._state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._state = dict(state)

    def dimensions(self, removal: float) -> Mapping[str, float]:
        return {}

    def rates(self, count: int) -> tuple[float, ...]:
        return ()

    def write(self, path: Path, facts: Calibrated) -> None:
        raise AssertionError


def saved(path: Path, windows: int = 3) -> bytes:
    partial = Partial(path, ASKED)
    partial.windows, partial.seconds = windows, 1.5
    partial.save(Counting(96))
    return path.read_bytes()


def test_the_state_is_there_again(tmp_path: Path) -> None:
    saved(tmp_path / "x")
    partial, calibrator = Partial(tmp_path / "x", ASKED), Counting()
    assert partial.resume(calibrator) == f"Resuming from {tmp_path / 'x'} after 96 tokens."
    assert (partial.windows, partial.seconds) == (3, 1.5)
    assert torch.equal(calibrator.state()["moments"], Counting(96).state()["moments"])


def test_no_change_of_the_file_is_gone_on_from(tmp_path: Path) -> None:
    whole, chance = saved(tmp_path / "x"), random.Random(0)
    for number in range(3000):
        data = mutated(whole, chance)
        if data == whole:
            continue
        with pytest.raises(ValueError, match=r"^it is "):
            read_state(data)
        if number % 100 == 0:
            path = tmp_path / f"{number}"
            path.write_bytes(data)
            partial, calibrator = Partial(path, ASKED), Counting()
            assert "Starting over." in partial.resume(calibrator)
            assert (partial.windows, calibrator.tokens) == (0, 0)
            assert path.with_name(f"{number}.aside").read_bytes() == data


EARLIER = to_bytes({"tokens": torch.tensor([1])}, {"kv-serve calibration 1": "{}"})


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"kv-serve calibration 2 \n", EARLIER])
def test_what_is_not_gone_on_from_is_kept_under_another_name(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.partial"
    path.write_bytes(data)
    (tmp_path / "x.partial.aside").write_text("mine")
    sentence = Partial(path, ASKED).resume(Counting())
    assert sentence.endswith(f"It is renamed to {path}.aside-2. Starting over.")
    assert ("from an earlier version" in sentence) == (b"calibration 2" not in data)
    assert (tmp_path / "x.partial.aside-2").read_bytes() == data
    assert (tmp_path / "x.partial.aside").read_text() == "mine"
    assert not path.exists()


def test_other_settings_start_anew_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    before = saved(path)
    sentence = Partial(path, ASKED | {"tokens": 8192}).resume(Counting())
    assert "its settings differ: tokens was 4096 and is 8192. It is renamed to" in sentence
    assert (tmp_path / "x.aside").read_bytes() == before


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be read: Is a directory; move it away"):
        Partial(tmp_path, ASKED).resume(Counting())


def test_an_older_state_stays_where_a_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    before = saved(path)

    def full_disk(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(ValueError, match="cannot be written: No space left on device; the pre"):
        saved(path, 4)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
