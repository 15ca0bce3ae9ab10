"""Files of fitted levels: what was saved, and a sentence for everything else."""

import os
import random
from pathlib import Path

import msgspec
import pytest

from fitted_cases import fitted, written
from kv_policy import NotCalibratedError
from kv_quant.level_file import Fit, FittedLevels, load, save


def said(path: Path) -> str:
    """Return the error for a file; empty if it is loaded."""
    try:
        load("k4v4", str(path))
    except ValueError as error:
        return str(error)
    return ""


def test_a_file_holds_what_was_saved(tmp_path: Path) -> None:
    saved = fitted()
    save(tmp_path / "levels.json", saved)
    found = load("k4v4", str(tmp_path / "levels.json"))
    assert found == saved
    assert load("k4v4", str(tmp_path / "levels.json")) is found
    assert found.outliers == (0, 2)
    assert found.of(3, 2) == next(f for f in saved.fits if (f.bits, f.outliers) == (3, 2))
    assert found.of(3, 1) is None


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = load("k4v4", file)
    save(Path(file), fitted(2.0))
    os.utime(file, ns=(1, 1))
    assert load("k4v4", file) != before


def test_a_missing_file_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(NotCalibratedError, match="kv-serve calibrate levels --model MODEL --out"):
        load("k4v4", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("no\0name", "cannot be read: embedded null byte"),
        (".", "is a directory; name a file of levels in it"),
        ("x.json.partial", "run the same `kv-serve calibrate levels` again, which resumes from"),
    ],
)
def test_a_name_of_no_file_is_a_sentence(tmp_path: Path, name: str, says: str) -> None:
    assert says in said(tmp_path / name)


def test_no_bytes_end_in_anything_but_a_sentence(tmp_path: Path) -> None:
    path, chance = tmp_path / "levels.json", random.Random(0)
    whole = Path(written(tmp_path)).read_bytes()
    deep = b'{"model":' * 100_000
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randint(0, 2 * len(data))])
        found = said(path)
        assert not found or " holds no levels: " in found
    for data in (b"", b"[]", b'{"model": "\xff"}', deep):
        path.write_bytes(data)
        assert " holds no levels: " in said(path)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"keys": (0.0, 0.5, 1.0)}, "codes of 2 bits have 4, ascending"),
        ({"values": (0.0, 0.5, 0.5, 1.0)}, "codes of 2 bits have 4, ascending"),
        ({"values": (0.0, 0.5, 0.75, 3.5)}, "in units of the scale they are from 0 to 3"),
        ({"keys": (-0.5, 0.5, 0.75, 1.0)}, "in units of the scale they are from 0 to 3"),
        ({"keys": ()}, "codes of 2 bits have 4, ascending"),
    ],
)
def test_levels_that_a_codec_cannot_have_are_refused(
    changed: dict[str, tuple[float, ...]], says: str, tmp_path: Path
) -> None:
    whole = fitted()
    wrong = [msgspec.structs.replace(f, **changed) if f.bits == 2 else f for f in whole.fits]
    found = msgspec.structs.replace(whole, fits=tuple(wrong))
    with pytest.raises(ValueError, match=says):
        save(tmp_path / "levels.json", found)
    assert not (tmp_path / "levels.json").exists()
    (tmp_path / "levels.json").write_bytes(msgspec.json.encode(found))
    assert says in said(tmp_path / "levels.json")


def test_levels_for_the_same_codes_twice_are_refused(tmp_path: Path) -> None:
    whole: FittedLevels = fitted()
    twice: tuple[Fit, ...] = (*whole.fits, whole.fits[0])
    with pytest.raises(ValueError, match="levels for 4 bits beside 0 outliers are given twice"):
        save(tmp_path / "levels.json", msgspec.structs.replace(whole, fits=twice))
