"""The bytes that a cache really holds: its tensors are found by following every reference."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType

import torch
from torch import Tensor, nn

# What a cache refers to and does not hold: code, and the model.
OTHERS = (ModuleType, FunctionType, BuiltinFunctionType, type, nn.Module)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a cache."""

    tensors: int  # elements of its tensors, each tensor once
    storages: int  # of the memory behind them, each piece once


def held(*roots: object) -> Held:
    """Count the tensors that can be reached from these objects, but not through the model.

    A slice keeps all of the memory that it was cut from, so `storages` may be more than `tensors`;
    tensors that share memory make it less.
    """
    found = list(_tensors(roots))
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return Held(sum(t.nbytes for t in found), sum(pieces.values()))


def _tensors(roots: tuple[object, ...]) -> Iterator[Tensor]:
    """Plain tensors; one that is made of others, as a quantized one is, counts as those."""
    seen: dict[int, object] = {}  # keeps what it has seen, so that no id is given twice
    todo = list(roots)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, OTHERS):
            continue
        seen[id(item)] = item
        if not isinstance(item, Tensor):
            todo += gc.get_referents(item)
        elif hasattr(item, "__tensor_flatten__"):
            names, _ = item.__tensor_flatten__()
            todo += [getattr(item, name) for name in names]
        elif item.device != torch.device("meta"):
            yield item
