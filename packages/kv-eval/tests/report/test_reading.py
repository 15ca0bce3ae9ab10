"""Which files a page is made of, and which are refused with a sentence."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kv_eval.report.page import page
from kv_eval.report.read import ReadError, read
from result_files import report, row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "a.json"
    report(row("full", 1, 1000), row("k8v4", 0.5, 400)).write(made)
    return made


def changed(path: Path, **fields: object) -> Path:
    """Write the same result with some fields of its first row changed."""
    found = json.loads(path.read_text())
    found["rows"][0].update(fields)
    path.write_text(json.dumps(found))
    return path


def test_a_file_is_read_as_it_was_written(path: Path) -> None:
    (found,) = read([path])
    assert found.name == "a.json"
    assert found.report == report(row("full", 1, 1000), row("k8v4", 0.5, 400))


def test_an_older_file_is_read(path: Path) -> None:
    old = json.loads(path.read_text())
    assert "kept" not in old
    assert "spectra" not in old
    del old["attention"]
    path.write_text(json.dumps(old))
    (found,) = read([path])
    assert found.report == report(row("full", 1, 1000), row("k8v4", 0.5, 400), attention=None)


def test_what_heads_keep_and_spectra_are_read_back(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "kept": {"snapkv": ((10.0, 20.5), (30.0,))},
        "spectra": {"keys": (((3.0, 1.0), (2.0,)),)},
    }
    made = report(row("snapkv", 1, 500), **more)
    made.write(tmp_path / "a.json")
    assert read([tmp_path / "a.json"])[0].report == made


def test_files_of_one_name_are_told_apart_by_their_paths(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "a.json"
    other.parent.mkdir()
    third = tmp_path / "b.json"
    for copy in (other, third):
        copy.write_bytes(path.read_bytes())
    assert [s.name for s in read([path, other, third])] == [str(path), str(other), "b.json"]


def test_a_name_that_is_not_utf_8_is_drawn(path: Path, tmp_path: Path) -> None:
    other = tmp_path / os.fsdecode(b"b\xff.json")
    try:
        other.write_bytes(path.read_bytes())
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    sources = read([path, other])
    assert [source.name for source in sources] == ["a.json", r"b\udcff.json"]
    assert rb"full (b\udcff.json)" in page(sources)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a result of `kv-serve eval`: Input data was truncated; use the"),
        (b"\xff\xfe", "is not a result of `kv-serve eval`: it is not UTF-8 text"),
        (b"[]", "Expected `object`, got `array`; use the --json output of a run that"),
        (b'{"x":' + b"[" * 100_000, "is not a result of `kv-serve eval`: its values are nested"),
        (b'{"name": "foundation", "rows": []}', "missing required field `model`"),
        (b'{"model": "m", "commit": "", "versions": {}, "rows": []}', "has no rows, so nothing"),
    ],
)
def test_what_is_no_result_is_refused(content: bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ReadError) as caught:
        read([path])
    assert str(caught.value).startswith(str(path))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"score": "0.5"}, "Expected `float`, got `str` - at `$.rows[0].score`"),
        ({"samples": 0}, "Expected `int` >= 1 - at `$.rows[0].samples`"),
        ({"full_bytes": 0}, "Expected `float` > 0.0 - at `$.rows[0].full_bytes`"),
        ({"kv_bytes": -1}, "Expected `float` >= 0.0 - at `$.rows[0].kv_bytes`"),
        ({"seconds": float("nan")}, "JSON is malformed"),
    ],
)
def test_a_row_that_nobody_measured_is_refused(
    fields: dict[str, object], sentence: str, path: Path
) -> None:
    with pytest.raises(ReadError, match="is not a result of `kv-serve eval`") as caught:
        read([changed(path, **fields)])
    assert sentence in str(caught.value)


def test_a_map_without_heads_is_refused(path: Path) -> None:
    found = json.loads(path.read_text()) | {"kept": {"k8v4": [[]]}}
    path.write_text(json.dumps(found))
    with pytest.raises(ReadError, match="Expected `array` of length >= 1"):
        read([path])


def test_files_of_two_models_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.json"
    report(row("full", 1, 1000), model="large").write(other)
    with pytest.raises(ReadError) as caught:
        read([path, other])
    assert str(caught.value) == (
        f"{other} is of the model large, but {path} is of tiny; a page compares policies on one "
        "model, so make a page of each"
    )


def test_a_file_that_is_missing_or_named_twice_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="cannot be read: No such file"):
        read([tmp_path / "missing.json"])
    with pytest.raises(ReadError, match="cannot be read: Is a directory"):
        read([tmp_path])
    with pytest.raises(ReadError, match="is given twice; name each file once"):
        read([path, tmp_path / "." / "a.json"])
    with pytest.raises(ReadError, match="no file is given"):
        read([])
