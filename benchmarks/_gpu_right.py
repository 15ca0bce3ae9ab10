"""Whether every kernel is right on this device, against the float64 reference or against torch.

A case of attention is a random cache on the CPU whose attention is computed there in float64, and
by Triton on the device. An error of an output is the largest over vectors, over the root mean
square of what is right: a wrong vector is about 1.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from _gpu_child import Report

from attention_cases import Case, random_case
from kv_policy import Observe

NEAR: Final = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
# Integers by bits; "raw" is the dtype of the queries.
FORMATS: Final = (
    ("raw", "raw"),
    ("8", "4"),
    ("4", "2"),
    ("8", "8"),
    ("4", "4"),
    ("2", "2"),
    ("1", "1"),
)
DIMS: Final = (128, 64, 96, 80, 256, 512)
GROUPS: Final = (4, 1, 8, 7, 16, 3)
WIDE: Final = 256  # dimensions, above which products in float32 are left to torch
OBSERVED: Final = {
    "all": Observe(None),
    "last": Observe(5, "max", power=2, skip=4),
    "sums": Observe(None, "max-of-sums", skip=1),
}
More = dict[str, Any]
# Kinds of caches that formats and sizes take in turn.
KINDS: Final[tuple[More, ...]] = (
    {"stored": 300, "page": 16},
    {"stored": 257, "page": 16, "window": 5, "padding": "left", "sinks": True},
    {"stored": 161, "page": 7, "spare": 3, "holes": True, "reverse": True, "softcap": 1.5},
    {"stored": 90, "page": 1, "padding": "right", "softcap": 1.5, "sinks": True},
)
SPECIAL: Final[Mapping[str, More]] = {
    "mixed": {"tiers": [("8", "4"), ("4", "2"), ("1", "1"), ("float16", "float32")], "window": 7},
    "grouped scales": {"tiers": [("8", "4"), ("4", "2")], "group": 32},
    "latents": {"tiers": [("8", "prefix"), ("raw", "prefix")], "D": 576, "Dv": 512, "H": 1},
    "large latents": {"tiers": [("8", "4"), ("raw", "4")], "D": 576, "Dv": 512, "H": 1},
    "uneven": {"tiers": [("8", "4")], "D": 37, "Dv": 21, "G": 3, "page": 7, "holes": True},
    "channel keys": {"tiers": [("shared", "shared")], "block": 4, "page": 4, "D": 64, "Dv": 64},
    "nothing stored": {"tiers": [("8", "8")], "stored": 0, "sinks": True},
    "one long row": {"tiers": [("4", "4")], "B": 1, "H": 1, "stored": 3000, "ragged": False},
    "dense alone": {"tiers": [], "window": 30, "softcap": 1.5},
}
QUICK: Final = ("d64 k8v4", "latents", "d64 k8v4 mass")


def attention_cases() -> dict[str, More]:
    """What each case of attention is drawn with, the most used first."""
    found: dict[str, More] = {}
    number = 0
    for dim in DIMS:
        for form in FORMATS:
            dtype = DTYPES[number % 3]
            if dim > WIDE and dtype == torch.float32:
                dtype = DTYPES[number % 2]
            name = "raw" if form[0] == "raw" else f"k{form[0]}v{form[1]}"
            found[f"d{dim} {name}"] = {
                "tiers": [form],
                "D": dim,
                "Dv": dim,
                "G": GROUPS[number % len(GROUPS)],
                "dtype": dtype,
                "scale": dim**-0.5,
                **KINDS[number % len(KINDS)],
            }
            number += 1
    for name, more in SPECIAL.items():
        sizes = {"stored": 150, "D": 128, "Dv": 128, "page": 16, "dtype": torch.bfloat16}
        found[name] = sizes | more
    return found


def cases(*, quick: bool) -> tuple[str, ...]:
    """The names of all cases, with what they need to compile spread evenly."""
    names = list(attention_cases())
    each = [*FURTHER_CASES, *names, *(f"{name} mass" for name in [*names[:8], *SPECIAL])]
    return tuple(name for name in each if not quick or name in QUICK or name in FURTHER_QUICK)


def drawn(name: str, queries: int, *, quick: bool) -> Case:
    """Draw a case."""
    more = dict(attention_cases()[name])
    dtype = str(more["dtype"]).removeprefix("torch.")
    more["tiers"] = [tuple(dtype if x == "raw" else x for x in tier) for tier in more["tiers"]]
    if quick:
        more |= {"stored": min(more["stored"], 40), "G": 2, "B": 1}
    sizes = {"group": 128 * 8} | more  # a scale for a vector
    return random_case(len(name), L=queries, **sizes)


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    """The largest error of a vector, over the root mean square of what is right."""
    found, right = found.detach().cpu().double(), right.detach().cpu().double()
    if found.numel() == 0 and right.numel() == 0:
        return 0.0
    if not found.isfinite().all():
        return torch.inf
    size = right.norm(dim=-1).square().mean().sqrt().clamp(min=1e-30)
    return float((found - right).norm(dim=-1).max() / size)


def right(report: Report, case: str) -> None:
    """Compare a case, and write its error."""
    if case in FURTHER_CASES:
        for name, wrong in FURTHER_CASES[case](report):
            report.add("right", case=case, what=name, wrong=wrong, ok=wrong is None)
        return
    name, mass = case.removesuffix(" mass"), case.endswith(" mass")
    for queries in (1, 3 if report.quick else 33):
        with report.trying(f"{case}, {queries} queries"):
            on_host = drawn(name, queries, quick=report.quick)
            if mass:
                _masses(report, case, on_host, queries)
            else:
                _outputs(report, case, on_host, queries)


def _outputs(report: Report, case: str, on_host: Case, queries: int) -> None:
    from kv_attention.gpu.backend import declined

    on_device = on_host.to(report.device)
    dtype = on_host.q.dtype
    error = error_of(
        on_device.attend(backend="triton").out, on_host.attend(backend="reference").out
    )
    report.add(
        "right",
        case=case,
        queries=queries,
        dtype=str(dtype),
        error=error,
        allowed=NEAR[dtype],
        by_torch=declined(on_device.inputs()),
        ok=error <= NEAR[dtype],
    )


def _masses(report: Report, case: str, on_host: Case, queries: int) -> None:
    on_device, dtype = on_host.to(report.device), on_host.q.dtype
    for name, what in OBSERVED.items():
        found = on_device.attend(what, "triton")
        expected = on_host.attend(what, "reference")
        most = max([float(x.abs().max()) for x in expected.mass if x.numel()], default=1.0)
        pairs = list(zip(found.mass, expected.mass, strict=True))
        error = max(
            [
                float((a.cpu().double() - b.double()).abs().nan_to_num(torch.inf).max())
                for a, b in pairs
                if b.numel()
            ],
            default=0.0,
        ) / max(most, 1e-30)
        seen = all(torch.equal(a.cpu(), b) for a, b in zip(found.seen, expected.seen, strict=True))
        report.add(
            "right",
            case=case,
            what=name,
            queries=queries,
            dtype=str(dtype),
            error=error,
            seen=seen,
            allowed=NEAR[dtype],
            ok=seen and error <= NEAR[dtype],
        )


def _further() -> Mapping[str, Callable[[Report], Iterator[tuple[str, str | None]]]]:
    import _gpu_right_pages as pages

    return pages.CASES


FURTHER_CASES: Final = _further()
FURTHER_QUICK: Final = ("pages k8v4 k4v2", "slots k8v4", "gate d64", "cache leankv")
