"""What our packages import besides torch and triton, where a machine has nothing else.

Importing this makes them importable from their sources: a script does so before it imports them.

Shapes in annotations mean nothing at run time, and no policy is parsed by a benchmark of kernels.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("Bool", "Float", "Float16", "Float32", "Float64", "Int", "Int32", "Int64", "UInt8")


class _Shaped:
    """Any of jaxtyping's types."""

    def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
        """The type of the array alone."""
        return item[0]


class _Meta:
    """A description of a parameter, which nobody reads here."""

    def __init__(self, **facts: object) -> None:
        """Take anything."""


def provide() -> None:
    """Put our sources on the path, and stand-ins for what is missing into sys.modules."""
    sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    sys.path[:0] = [str(path) for path in sorted(ROOT.glob("packages/*/tests/support"))]
    if find_spec("jaxtyping") is None:
        _stand_in("jaxtyping", dict.fromkeys(SHAPES, _Shaped))
    if find_spec("msgspec") is None:
        _stand_in("msgspec", {"Meta": _Meta})


def _stand_in(name: str, members: dict[str, object]) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


provide()
