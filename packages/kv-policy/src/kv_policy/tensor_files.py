"""Files of tensors and facts in the safetensors format, with checksums, such as calibrations.

The facts and their checksum are in the file's header, so they can be read and verified without the
tensors; the checksum of the tensors is part of the header.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from kv_policy.calibrator import calibrate_command
from kv_policy.files import write_whole

_AGAIN: Final = "calibrate again"


def write(path: Path, form: str, facts: str, tensors: Mapping[str, Tensor]) -> None:
    """Write a file atomically.

    Args:
        path: the file, commonly `*.safetensors`.
        form: name and version of the format.
        facts: any text, readable without the tensors.
        tensors: on the CPU.

    Raises:
        OSError: writing failed; an existing file is unchanged.
    """
    names = {name: tensor.contiguous() for name, tensor in tensors.items()}
    known = f"{checksum(names)} {facts}"
    header = {form: f"{_sha256(known)} {known}"}  # one entry: the order of several is random
    write_whole(path, to_bytes(names, header))


class Stamp(NamedTuple):
    """Identity of a file's content, as a cache key."""

    path: Path
    changed: int  # ns
    size: int  # bytes
    inode: int  # changes if the file is replaced


def stamp(path: Path) -> Stamp:
    """Return a file's stamp without reading it; a missing file fails when it is read."""
    path = Path(os.path.abspath(path))
    try:
        found = path.stat()
    except (OSError, ValueError):  # a name with a null byte is a ValueError
        return Stamp(path, 0, 0, 0)
    return Stamp(path, found.st_mtime_ns, found.st_size, found.st_ino)


def read_facts(path: Path, form: str, calibration: str) -> str:
    """Read only the facts.

    Args:
        path: the file.
        form: name and version of the format.
        calibration: the method argument of `kv-serve calibrate` that writes such files.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or of another format.
    """
    return _open(path, form, _calibration(path, calibration), tensors=False)[0]


def read(path: Path, form: str, calibration: str) -> tuple[str, dict[str, Tensor]]:
    """Read facts and tensors, and verify every byte of both; arguments as for `read_facts`.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or of another format.
    """
    return _open(path, form, _calibration(path, calibration), tensors=True)


class Advice(NamedTuple):
    """How errors about a file end."""

    missing: str  # for one that does not exist, such as "write it with `...`"
    again: str  # for one of another format
    damaged: str  # for a damaged one


def read_advised(
    path: Path, form: str, advice: Advice, *, tensors: bool = True
) -> tuple[str, dict[str, Tensor]]:
    """Read facts and tensors of a file that is no calibration, and verify every byte of both.

    Tensors are views of the mapped file: copy what is kept.

    Args:
        path: the file.
        form: name and version of the format.
        advice: how errors end.
        tensors: whether to read tensors, too.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged, of another format, or of a newer version.
    """
    return _open(path, form, advice, tensors=tensors)


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(to_bytes({name: tensors[name]}))
    return digest.hexdigest()


def _calibration(path: Path, calibration: str) -> Advice:
    """Return the advice for a file of a calibration.

    Raises:
        ValueError: the file is the state of an unfinished one.
    """
    if path.suffix == ".partial":
        whole = path.with_suffix("")
        raise ValueError(
            f"{path} holds the state of an unfinished calibration; run its command again, such as "
            f"`{calibrate_command(calibration, str(whole))}`, which resumes from it, and use "
            f"{whole}"
        )
    command = calibrate_command(calibration, str(path))
    return Advice(f"write it with `{command}`", f"calibrate again with `{command}`", _AGAIN)


def _open(path: Path, form: str, advice: Advice, *, tensors: bool) -> tuple[str, dict[str, Tensor]]:
    try:
        path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist; {advice.missing}") from None
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{str(path)[:200]} cannot be read: {reason}; name a file") from None
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a file in it")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            names = file.keys() if tensors else []
            found = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from None
    if form not in header:
        _expect_older(path, form, header)
        other = ", ".join(map(repr, sorted(header))) or "something else"
        raise ValueError(f"{path} has no {form!r}, but {other}; {advice.again}")
    whole, _, known = header[form].partition(" ")
    sums, _, facts = known.partition(" ")
    if whole != _sha256(known) or (tensors and sums != checksum(found)):
        raise ValueError(f"{path} is damaged: its checksum does not match; {advice.damaged}")
    return facts, found


def _expect_older(path: Path, form: str, header: Mapping[str, str]) -> None:
    """Raise if a file is of a newer version of a format.

    Raises:
        ValueError: it is.
    """
    name, _, version = form.rpartition(" ")
    for each in header:
        its, _, number = each.rpartition(" ")
        newer = number.isascii() and number.isdigit() and len(number) < 9
        if its == name and newer and int(number) > int(version):
            raise ValueError(
                f"{path} has version {number} of the format {name!r}, but the installed packages "
                f"read versions up to {version}; install newer ones"
            )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
