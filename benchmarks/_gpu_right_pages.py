"""Whether page kernels, slots, gates and whole caches are right on this device.

Pages are written, moved and read in turn by torch on the CPU and by Triton on the device: every
byte is the same. Caches are checked by the self-check that they run before they use a backend.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from kv_policy import CacheShape, PageLayout, parse, tier_formats

if TYPE_CHECKING:
    from _gpu_child import Report

Found = Iterator[tuple[str, str | None]]
BOTH: Final = frozenset({"keys", "values"})
# Kinds of the tiers, dimensions of keys and values, tokens of a page.
PAGES: Final[Mapping[str, tuple[list[tuple[str, str]], tuple[int, int], int]]] = {
    "k8v4 k4v2": ([("8", "4"), ("4", "2")], (128, 128), 16),
    "raw k8v8 k2v2": ([("bfloat16", "bfloat16"), ("8", "8"), ("2", "2")], (64, 64), 16),
    "uneven": ([("float16", "8"), ("8", "4/3"), ("4", "2"), ("2", "1")], (20, 5), 2),
    "fp32 k4v4": ([("float32", "float32"), ("4", "4")], (80, 96), 7),
    "large": ([("8", "4"), ("4", "2")], (256, 256), 16),
}
POLICIES: Final = (
    "k8v4",
    "k4v2",
    "bf16",
    "kv-compress:rate=4+k8v4",
    "leankv",
    "snapkv:budget=64+k4v2",
    "h2o:budget=64+k8v4",
    "streaming:budget=64+k8v8",
    "k4v4:keys=channel",
    "quest:budget=48,sinks=0,recent=0,whole=0+k8v4",
)
SLOTS: Final = ("k8v4", "k4v2", "bf16")
GATES: Final = {"d64": (64, 16), "d128": (128, 33)}


def pages(report: "Report", name: str) -> Found:
    """Random prompts, decode steps and beams over tiers, and tokens written one by one."""
    from kv_paging import Tiers, fit
    from triton_cases import Both, Program, form, one_store

    kinds, dims, tokens = PAGES[name]
    forms = [form(*each, *dims) for each in kinds]
    layouts = fit(forms, tokens, True, True)
    both = Both(lambda pool: Tiers(pool, layouts, 2, 3, 2), layouts[0].nbytes)
    yield "tiers", said(lambda: Program(both, len(kinds), 12, 3, dims).run(2, 2))

    def store() -> None:
        layout = PageLayout.sized(forms[0], tokens, True, True)
        one, draw = one_store(layout), torch.Generator().manual_seed(3)
        for length in (7, 0, 40):
            key, value = (torch.randn(3, length, d, generator=draw) for d in dims)
            keep = torch.rand(3, length, generator=draw) < 0.7
            place = torch.arange(length).int().expand(3, -1)
            one.do("append", torch.arange(3), key, value, keep, keep.float(), place)
        every = torch.arange(3)
        one.do("read", every, BOTH)
        one.do("weakest_all", None)
        stay = torch.rand(3, one.each[0].longest, generator=draw) < 0.5
        one.do("compact", every, stay)
        one.do("read", every, BOTH)

    yield "a store", said(store)


def said(work: Callable[[], object]) -> str | None:
    """How a comparison fails; None: it passes."""
    try:
        work()
    except AssertionError as error:
        return f"differs: {str(error)[:400]}"
    return None


def slots(report: "Report", name: str) -> Found:
    """Requests over blocks, in pieces; Triton on the device beside torch on the CPU."""
    from _gpu_right import error_of

    from kv_runtime import Blocks, SlotLayer

    heads, group, dim, size, lengths = 2, 4, 64, 16, (37, 5)
    kind = torch.bfloat16
    (form,) = tier_formats(parse(name), CacheShape(1, heads, group, dim, dim, kind))
    columns = 4
    draw = torch.Generator().manual_seed(1)
    table = 1 + torch.randperm(len(lengths) * columns, generator=draw).view(-1, columns)
    table = table.to(torch.int32)
    caches = {}
    for device, backend in (("cpu", "torch"), (report.device, "triton")):
        memory = torch.zeros(
            10, heads, size, form.nbytes, dtype=torch.uint8, device=torch.device(device)
        )
        where = torch.device(device)
        blocks = Blocks.of(form, heads, size, heads * size * form.nbytes, where, backend)
        caches[backend] = (memory, blocks, SlotLayer(form, dim**-0.5, backend), where)
    done = [0, 0]
    for counts in ((30, 5), (7, 0), (1, 1), (1, 1)):
        start = torch.tensor([0, *counts]).cumsum(0)
        rows = [
            torch.randn(sum(counts), n, dim, generator=draw).to(kind)
            for n in (heads * group, heads, heads)
        ]
        after = [before + n for before, n in zip(done, counts, strict=True)]
        slot = torch.tensor(
            [
                int(table[r, at // size]) * size + at % size
                for r, n in enumerate(counts)
                for at in range(done[r], done[r] + n)
            ]
        )
        found = {}
        for backend, (memory, blocks, layer, where) in caches.items():
            given = [x.to(where) for x in rows]
            length = torch.tensor(after, device=where)
            step = blocks.step(start, length, max(after), table.to(where), slot.to(where))
            out = torch.zeros_like(given[0])
            layer.forward(*given, memory, step, out)
            found[backend] = out
        done = after
        error = error_of(found["triton"], found["torch"])
        yield f"{counts}", None if error <= 6e-2 else f"its output differs by {error:.3f}"
        same = torch.equal(caches["triton"][0].cpu(), caches["torch"][0])
        yield f"{counts} stored", None if same else "its bytes differ"


def gate(report: "Report", name: str) -> Found:
    """Scores of a gate, against float64."""
    from dataclasses import replace

    from gate_cases import exact, gate_of, rope_of, view_of
    from kv_evict import gate_triton

    dim, units = GATES[name]
    shape = CacheShape(3, 2, 1, dim, dim, rope=rope_of(dim))
    weights, view = gate_of(shape, units), view_of(shape, [2, 0], 37, torch.bfloat16)
    names = ("layer", "position", "fresh", "score", "length", "keys", "values")
    there = replace(view, **{each: getattr(view, each).to(report.device) for each in names})
    network = weights.on(torch.device(report.device))
    found = gate_triton.gate(there, network.linear, network.inner, network.outer)
    want = exact(weights, view)
    error = (found.cpu().double() - want).abs() / want.abs().clamp(min=1)
    most = float(error.nan_to_num(torch.inf).max())
    yield "scores", None if most <= 1e-4 else f"its scores differ by {most:.5f}"


def cache(report: "Report", policy: str) -> Found:
    """The self-check of a cache under a policy."""
    from kv_runtime import PolicyCache, SelfCheck

    layers = 1 if report.quick else 3
    dims = (64,) if report.quick else (128, 64)
    for dim in dims:
        for dtype in (torch.float32,) if report.quick else (torch.bfloat16, torch.float32):
            shape = CacheShape(layers, 2, 4, dim, dim, dtype)
            device = torch.device(report.device)
            check = SelfCheck("triton", parse(policy), shape, device, 16, PolicyCache)
            yield f"{dim}, {dtype}", check.run()


CASES: Final[Mapping[str, Callable[["Report"], Found]]] = {
    **{f"cache {name}": partial(cache, policy=name) for name in POLICIES},
    **{f"pages {name}": partial(pages, name=name) for name in PAGES},
    **{f"slots {name}": partial(slots, name=name) for name in SLOTS},
    **{f"gate {name}": partial(gate, name=name) for name in GATES},
}
