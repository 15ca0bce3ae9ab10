"""Atomic file writes.

A new file is written next to its target under a fresh random name, synced to disk, and then
renamed over the target.
"""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_STEM: Final = 32  # characters of the target's name in the name of a temporary file


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; an existing file is replaced only once the new one is on disk.

    A symbolic link is kept and its target is replaced. A replaced file keeps its permissions; a
    read-only file is not replaced. A device or a pipe, such as /dev/stdout, is written to directly.

    Raises:
        OSError: writing failed; `filename` is the path, and an existing file is unchanged.
    """
    try:
        found = _look(path)
        if found is not None and not stat.S_ISREG(found.st_mode):
            with path.open("wb") as stream:  # fails for a folder, as it should
                stream.write(data)
            return
        if found is not None:
            _expect_permitted(path)
        target = Path(os.path.realpath(path))
        fresh, handle = _fresh(target, found)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if found is not None:
                os.chmod(fresh, stat.S_IMODE(found.st_mode))
            os.replace(fresh, target)
        except BaseException:  # KeyboardInterrupt must clean up too
            with suppress(OSError):
                fresh.unlink()
            raise
        _sync_folder(target.parent)
    except (OSError, ValueError) as error:
        raise _of(path, error) from error


def expect_writable(path: Path) -> None:
    """Check that `write_whole` can write a file; create its folder but not the file.

    Raises:
        OSError: the file cannot be written; `filename` is the path.
    """
    try:
        found = _look(path)
        if found is not None:
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            _expect_permitted(path)
            if not stat.S_ISREG(found.st_mode):
                return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh, handle = _fresh(target, found)
        os.close(handle)
        fresh.unlink()
    except (OSError, ValueError) as error:
        raise _of(path, error) from error


def set_aside(path: Path) -> Path:
    """Rename a file to its name plus `.aside`, or `.aside-2` and so on; return the new path.

    No existing file is overwritten.

    Raises:
        OSError: it cannot be renamed.
    """
    number = 1
    while True:
        aside = path.with_name(f"{path.name}.aside" + ("" if number == 1 else f"-{number}"))
        try:
            os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            number += 1
            continue
        try:
            os.replace(path, aside)  # over the empty file just created
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
        return aside


def _look(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _expect_permitted(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _fresh(target: Path, found: os.stat_result | None) -> tuple[Path, int]:
    """Create a file with a new name; the umask applies to the permissions of a new target."""
    while True:
        fresh = target.with_name(f".{target.name[:_STEM]}.{secrets.token_hex(8)}.part")
        mode = 0o666 if found is None else 0o600
        try:
            return fresh, os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except FileExistsError:
            continue


def _sync_folder(folder: Path) -> None:
    """Sync the new name to disk, where the system can open a folder."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _of(path: Path, error: OSError | ValueError) -> OSError:
    """Return the error with the given path instead of the temporary file's."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), str(path))
    return OSError(errno.EINVAL, str(error), str(path))  # a name with a null byte
