"""What our packages import besides torch and triton, where a machine has nothing else.

Importing this makes them importable from their sources: a script does so before it imports them.

Shapes in annotations mean nothing at run time. Policies are found as if the packages were
installed, and their parameters are converted but not checked.
"""

import atexit
import shutil
import sys
import tempfile
import tomllib
import types
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
SHAPES = (
    *("BFloat16", "Bool", "Float", "Float16", "Float32", "Float64"),
    *("Int", "Int32", "Int64", "UInt8"),
)
COMPILED = "kv-cpu"  # it has to be built, and is of no use here


class _Shaped:
    """Any of jaxtyping's types."""

    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        """The type of the array alone."""
        return item[0]


class _Meta:
    """A description of a parameter, which nobody reads here."""

    def __init__(self, **facts: object) -> None:
        """Take anything."""


class _Struct:
    """A class of records."""

    def __init_subclass__(cls, **options: object) -> None:
        """Take anything."""

    def __init__(self, **facts: object) -> None:
        """Hold what is given."""
        vars(self).update(facts)


class _Anything:
    """Something that is only imported, called and combined."""

    def __getattr__(self, name: str) -> "_Anything":
        """Itself."""
        return self

    def __call__(self, *given: object, **named: object) -> "_Anything":
        """Itself."""
        return self


def _convert(value: Any, hint: Any, strict: bool = True) -> Any:
    """Convert a parameter as msgspec does, its bounds aside."""
    kind = get_origin(hint)
    if kind is Annotated:
        return _convert(value, get_args(hint)[0], strict)
    if kind is Literal:
        choices = [x for x in get_args(hint) if x == value or (not strict and str(x) == value)]
        if choices:
            return choices[0]
    elif kind in (Union, types.UnionType):
        for each in get_args(hint):
            try:
                return _convert(value, each, strict)
            except ValueError:
                continue
    elif hint is type(None) and value is None:
        return None
    elif hint is bool and not strict and value in ("true", "false"):
        return value == "true"
    elif hint in (int, float) and not strict and isinstance(value, str):
        return hint(value)
    elif hint is float and type(value) is int:
        return float(value)
    elif hint is Any or type(value) is hint:
        return value
    raise ValueError(f"{value!r} is no {hint}")


def provide() -> None:
    """Put our sources on the path, and stand-ins for what is missing into sys.modules."""
    sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/tests/support"))]
    _announce()
    if find_spec("jaxtyping") is None:
        _stand_in("jaxtyping", dict.fromkeys(SHAPES, _Shaped))
    if find_spec("msgspec") is None:
        names = {"Meta": _Meta, "Struct": _Struct, "convert": _convert, "json": _Anything()}
        _stand_in("msgspec", names | {"MsgspecError": ValueError})
    if find_spec("safetensors") is None:
        _stand_in("safetensors", {"SafetensorError": ValueError, "safe_open": _Anything()})
        _stand_in("safetensors.torch", {"save": _Anything()})
    if find_spec("hypothesis") is None:  # which helpers of tests import
        _stand_in("hypothesis", {"settings": _Anything(), "strategies": _Anything()})


def _announce() -> None:
    """Let the entry points of our packages be found, where these are not installed."""
    installed = {each.metadata["Name"] for each in distributions()}
    files = sorted(ROOT.glob("packages/*/pyproject.toml"))
    projects = [tomllib.loads(path.read_text())["project"] for path in files]
    missing = [each for each in projects if each["name"] not in {*installed, COMPILED}]
    if not missing:
        return
    folder = Path(tempfile.mkdtemp(prefix="kv-entry-points-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for each in missing:
        name, version = each["name"], each.get("version", "0")
        about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        about.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        about.joinpath("entry_points.txt").write_text(
            "".join(
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
                for group, entries in each.get("entry-points", {}).items()
            )
        )
    sys.path.append(str(folder))


def _stand_in(name: str, members: dict[str, object]) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


provide()
