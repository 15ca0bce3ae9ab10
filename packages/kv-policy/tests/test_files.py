"""Files are written atomically, and other files of the user beside them are untouched."""

import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kv_policy.decoding import decode
from kv_policy.files import expect_writable, set_aside, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for data in (b"one", b"", b"another"):
        write_whole(tmp_path / "x", data)
        assert (tmp_path / "x").read_bytes() == data
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("write", [lambda path: write_whole(path, b"new"), expect_writable])
def test_files_beside_it_are_neither_used_nor_followed(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("dear")
    beside = [tmp_path / f"x{end}" for end in (".new", ".part", ".tmp", f".{os.getpid()}.part")]
    beside[0].write_text("mine")
    for link in beside[1:]:
        link.symlink_to(victim)
    before = names(tmp_path)
    write(tmp_path / "x")
    assert {*names(tmp_path)} - {"x"} == {*before}
    assert beside[0].read_text() == "mine"
    assert all(link.is_symlink() for link in beside[1:])
    assert victim.read_text() == "dear"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_what_was_there_stays_where_writing_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    (tmp_path / "x").write_text("older")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(step, fail)
    with pytest.raises(type(error)) as raised:
        write_whole(tmp_path / "x", b"new")
    if isinstance(raised.value, OSError):
        assert raised.value.filename == str(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "older"
    assert names(tmp_path) == ["x"]


def test_a_link_stays_one_and_what_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, dangling = tmp_path / "far" / "x", tmp_path / "link", tmp_path / "dangling"
    target.write_text("older")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "far" / "y")
    for each in (link, dangling):
        expect_writable(each)
        write_whole(each, b"new")
        assert each.is_symlink()
        assert each.read_bytes() == b"new"
    assert names(tmp_path / "far") == ["x", "y"]


def test_permissions_are_those_of_the_older_file_or_of_a_new_one(tmp_path: Path) -> None:
    path, plain = tmp_path / "x", tmp_path / "plain"
    plain.touch()
    write_whole(path, b"")
    assert path.stat().st_mode == plain.stat().st_mode
    for mode in (0o600, 0o644, 0o770):
        path.chmod(mode)
        write_whole(path, b"again")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_file_that_may_not_be_written_to_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("dear")
    path.chmod(0o444)
    monkeypatch.setattr("os.access", lambda *_: False)  # as for all but the superuser
    for write in (lambda path: write_whole(path, b""), expect_writable):
        with pytest.raises(PermissionError, match="Permission denied"):
            write(path)
    assert path.read_text() == "dear"
    assert names(tmp_path) == ["x"]


def test_a_device_or_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    expect_writable(Path(os.devnull))
    write_whole(Path(os.devnull), b"x")
    assert not Path(os.devnull).is_file()
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    expect_writable(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"through")
    reader.join()
    assert got == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["", "x" * 300, "no\0name"])
def test_a_name_that_cannot_be_written_is_an_os_error(tmp_path: Path, name: str) -> None:
    for write in (lambda path: write_whole(path, b""), expect_writable):
        with pytest.raises(OSError, match=re.escape(repr(str(tmp_path / name)))) as raised:
            write(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name)
        assert raised.value.strerror
    assert names(tmp_path) == []


def test_links_that_lead_in_a_circle_are_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for write in (lambda path: write_whole(path, b""), expect_writable):
        with pytest.raises(OSError, match="symbolic links"):
            write(tmp_path / "a")
    assert names(tmp_path) == ["a", "b"]


def test_a_long_name_that_a_file_may_have_is_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 255), b"")
    write_whole(tmp_path / ("\N{SNOWMAN}" * 85), b"")
    assert len(names(tmp_path)) == 2


def test_a_folder_is_made_for_a_file_that_will_be_written(tmp_path: Path) -> None:
    expect_writable(tmp_path / "a" / "b" / "x")
    assert names(tmp_path / "a" / "b") == []


def test_what_is_set_aside_takes_the_place_of_nothing(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "x").write_text(str(number))
        set_aside(tmp_path / "x")
    found = [(tmp_path / f"x.aside{end}").read_text() for end in ("", "-2", "-3")]
    assert found == ["0", "1", "2"]
    with pytest.raises(FileNotFoundError):
        set_aside(tmp_path / "x")
    assert names(tmp_path) == ["x.aside", "x.aside-2", "x.aside-3"]


class Form(msgspec.Struct):
    a: list[object] = []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": ["\xff"]}', "it is not UTF-8 text"),
        (b'{"a": ["', "truncated"),
        (b'{"a": ["x\xff"', "it is not UTF-8 text"),
        (b'{"a": ["\xed\xa0\x80"]}', "it is not UTF-8 text"),
        (b'{"a": ' + b"[" * 100_000, "nested too deep"),
        (b"{", "truncated"),
        (b'{"a": 1}', "Expected `array`"),
        ('{"a": ["\ud800"]}', "it is not UTF-8 text"),
    ],
)
def test_whatever_is_wrong_with_json_is_a_clause(data: bytes | str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        decode(data, Form)
    assert type(raised.value) is ValueError
