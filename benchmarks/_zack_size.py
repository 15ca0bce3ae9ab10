"""What the benchmark of ZACK's quality runs: policies, methods, and how much of each."""

from dataclasses import dataclass
from typing import Final

from kv_eval.evaluate.plan import Plan
from kv_transformers.from_text import FULL

METHODS: Final = (
    "zack:multiple=1",
    "zack:multiple=1,ranks=uniform",
    "zack:multiple=8",
    "zack",
    "kq-svd:multiple=1",
)
ALONE: Final = (
    *(f"zack:rate={rate},multiple=8" for rate in (0.125, 0.25, 0.375, 0.5)),
    *(f"zack:rate={rate},multiple=8,ranks=uniform" for rate in (0.125, 0.25)),
)
RELATIVES: Final = (
    *(f"kq-svd:rate={rate},multiple=8" for rate in (0.125, 0.25)),
    "svd-kv:rate=0.125,multiple=8",
    "palu:rate=0.125,multiple=8,together=3",
    "think:rate=0.25",
)
QUANTIZED: Final = ("k8v4", "k4v4", "k4v2")
BOTH: Final = (
    "zack:rate=0.125,multiple=8+k8v8",
    "zack:rate=0.125,multiple=8+k8v4",
    "zack:rate=0.25,multiple=8+k8v4",
    "kq-svd:rate=0.125,multiple=8+k8v4",
    "zack:rate=0,multiple=8+k4v4",
    "zack:rate=0.125,multiple=8+leankv:window=16",
)
EVICTED: Final = (
    "kv-compress:rate=4",
    "kv-compress:rate=4+zack:rate=0.125,multiple=8",
)


@dataclass(frozen=True)
class Size:
    """How much is run."""

    tokens: int  # of calibration
    counts: tuple[int, ...]  # tokens of other calibrations, the last the one to compare with
    windows: int  # held out, of `length` tokens
    length: int
    halvings: int
    methods: tuple[str, ...]
    policies: tuple[str, ...]
    plans: dict[str, Plan]


def full_size() -> Size:
    """What the committed figures come from."""
    return Size(
        tokens=16384,
        counts=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
        windows=4,
        length=1024,
        halvings=6,
        methods=METHODS,
        policies=(FULL, *ALONE, *RELATIVES, *QUANTIZED, *BOTH, *EVICTED),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=2000, samples=6),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=2000, samples=4),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=1024, samples=4, batch=4, continuation=64
            ),
        },
    )


def quick_size() -> Size:
    """A smoke run: the same steps on very little."""
    return Size(
        tokens=512,
        counts=(256, 512),
        windows=1,
        length=96,
        halvings=1,
        methods=METHODS[:1],
        policies=(FULL, "zack:rate=0.25,multiple=8", "zack:rate=0.25,multiple=8+k8v4"),
        plans={
            "needle": Plan((FULL,), ("needle",), ("aware",), length=300, samples=1),
            "multikey": Plan((FULL,), ("multikey",), ("aware",), length=300, samples=1),
            "nll": Plan(
                (FULL,), ("nll",), ("agnostic",), length=160, samples=1, batch=1, continuation=3
            ),
        },
    )
