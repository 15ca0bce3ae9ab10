"""The maps of a decode step on rows, for the judge of native calls: plain products in float64."""

import torch

from kv_policy.described import NUMBERS


def bases_of(maps, kinds, heads):
    """Return the maps by kind; the shift of keys is the last kind."""
    if sorted(set(kinds)) != list(kinds) or len(maps) != len(kinds):
        raise IndexError(f"maps of kinds {kinds}")
    for x, kind in zip(maps, kinds, strict=True):
        fits = x.dim() < 3 or (x.dim() == 3 and len(x) == heads)
        if kind not in range(5) or x.dtype not in NUMBERS or not fits:
            raise IndexError(f"a map {x.shape} in {x.dtype} of kind {kind}")
        if not all(1 <= size <= 1024 for size in x.shape[-2:]):
            raise IndexError(f"a map of {x.shape}")
    found = dict(zip(kinds, maps, strict=True))
    if 4 in found and found[4].shape != (heads, found[0].shape[-2]):
        raise IndexError("a shift")
    return found


def multiplied(x, matrix):
    """Return the products of vectors by row and head, in float64."""
    if matrix is None:
        return x.double()
    count = len(matrix) if matrix.dim() == 3 else 1
    grouped = x.double().unflatten(1, (count, -1))
    return ((grouped @ matrix.double()) + 0.0).flatten(1, 2)


def stored_rows(key, value, bases):
    """Return keys and values as they are stored."""
    less = key - bases[4].to(key.dtype) if 4 in bases else key
    each = (less, bases.get(0)), (value, bases.get(2))
    return [multiplied(x, matrix).float().to(x.dtype) for x, matrix in each]


def settle_maps(args, copies) -> None:
    """Set what is stored and copied to the reference's where that is infinite or NaN after maps."""
    key, value, maps, kinds = copies[1], copies[2], copies[18], copies[19]
    both = stored_rows(key, value, dict(zip(kinds, maps, strict=True)))
    if all(x.isfinite().all() for x in both):
        return
    for x, y in zip((*args[15][:1], *args[17]), (*copies[15][:1], *copies[17]), strict=True):
        wild = ~y.isfinite() if x.is_floating_point() else torch.ones_like(x).bool()
        x.copy_(torch.where(wild, y, x))
