"""Temporaries of attention are bounded for any cache size."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kv_policy import Observe


class Largest(TorchDispatchMode):
    """Records the largest result of any operation, in bytes."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in results if isinstance(results, tuple | list) else (results,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in held:
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return results


def largest(case, observe, room, monkeypatch):
    monkeypatch.setattr("kv_attention.parts.ROOM", room)
    with Largest() as found:
        case.attend(observe)
    return found.nbytes


def test_blocks_bound_what_is_held(case, monkeypatch):
    decode = {"B": 1, "H": 1, "G": 2, "L": 1, "D": 16, "Dv": 16, "ragged": False, "fresh": False}
    sizes = {}
    for stored in (300, 1500):
        c = case(1, stored=stored, page=16, tiers=[("8", "4")], **decode)
        decompressed = 4 * 16 * stored
        sizes[stored] = largest(c, Observe(), 16 * 64, monkeypatch)
        assert sizes[stored] <= 4 * 16 * 64 < decompressed / 4
        # The observed mass itself has one number per token.
        assert largest(c, Observe(1), 16 * 64, monkeypatch) <= max(sizes[stored], 8 * stored)
    assert sizes[300] == sizes[1500]


def test_no_matrix_of_queries_times_tokens(case, monkeypatch):
    for window, padding in ((0, "left"), (200, "none")):
        c = case(2, B=1, H=1, G=1, L=256, D=8, Dv=8, tiers=[], window=window, padding=padding)
        for observe in (Observe(), Observe(None)):
            assert largest(c, observe, 2048, monkeypatch) <= 16 * 2048 < 256 * 256
