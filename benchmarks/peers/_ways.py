"""The ways to hold a cache that are compared: short lists, fixed here for ours and for peers.

A way of kvpress is named `method:keep=SHARE`, with the share of the tokens that it says it keeps,
and with `+quanto4` behind it where what is kept is stored in 4 bits. Ours are named as
`kv_policy.parse` reads them.
"""

import re
from typing import Final

from _work import FULL

KEPT: Final = (0.5, 0.25, 0.125)
KEPT_QUANTIZED: Final = (0.88, 0.44)  # 4 bits and their scales take 0.281 of the bytes
PRESSES: Final = (
    "streaming-llm",
    "snapkv",
    "snapkv-pool21",  # pools over 21 tokens, where kvpress pools over 5
    "pyramidkv",
    "expected-attention",
    "tova",
    "chunkkv",  # over SnapKV
)
QUANTIZED_PRESSES: Final = ("snapkv-pool21", "expected-attention", "tova", "chunkkv")
# These keep everything and hide a part from attention, so no budget has room for them.
ADAKV: Final = "adakv-expected-attention"
KVZIP: Final = "kvzip"  # reads a prompt many times over, for questions that come later

OURS: Final = (
    "k8v4",
    "k8v4:window=64",
    "k4v4",
    "k4v4:window=64",
    "leankv",
    "k4v2",
    "k4v2:window=64",
    "k4v4:keys=channel",
    "k4v2:keys=channel,block=64",
    "kv-compress:rate=1.8+k8v4",
    "kv-compress:rate=1.27+k4v4",
    "snapkv:budget=78%+k4v4",
    "expected-attention:budget=78%+k4v4",
    "tova:budget=78%+k4v4",
    "keydiff:budget=78%+k4v4",
    "chunkkv:budget=78%+k4v4",
    "kv-compress:rate=3.7+k8v4",
    "kv-compress:rate=2.6+k4v4",
    "snapkv:budget=38%+k4v4",
    "expected-attention:budget=38%+k4v4",
    "tova:budget=38%+k4v4",
    "keydiff:budget=38%+k4v4",
    "chunkkv:budget=38%+k4v4",
    "snapkv:budget=48%",
    "snapkv:budget=23.8%",
    "snapkv:budget=11.7%",
    "snapkv:budget=38%,window=64+k4v4",  # the window of kvpress
    "snapkv:budget=11.7%,window=64",
    "kv-compress:rate=2.1",
    "kv-compress:rate=4.3",
    "kv-compress:rate=8.8",
)


def _presses() -> tuple[str, ...]:
    plain = [f"{name}:keep={kept}" for name in (*PRESSES, ADAKV) for kept in KEPT]
    stored = [
        f"{name}:keep={kept}+quanto4" for name in QUANTIZED_PRESSES for kept in KEPT_QUANTIZED
    ]
    return (*plain, *stored)


WAYS: Final[dict[str, tuple[str, ...]]] = {
    "ours": (FULL, *OURS),
    "quantized": (
        FULL,
        "quanto4",
        "quanto2",
        "quanto4:keys=channel",
        "quanto2:keys=channel",
        "hqq4",
        "hqq3",
        "hqq2",
    ),
    "vllm": (FULL, "fp8"),
    "kvpress": (FULL, *_presses()),
    "kvzip": tuple(f"{KVZIP}:keep={kept}" for kept in KEPT),
}
LONGEST_FIRST: Final = ("kvpress", "ours", "quantized", "kvzip", "vllm")
REFERENCE: Final = {"kvzip": "kvpress"}  # whose full cache is compared with, where not its own
# What is timed: one of each kind. What engines take is in the benchmarks of vLLM.
TIMED: Final[dict[str, tuple[str, ...]]] = {
    "ours": (
        FULL,
        "k8v4",
        "k4v4",
        "leankv",
        "kv-compress:rate=1.8+k8v4",
        "kv-compress:rate=3.7+k8v4",
    ),
    "quantized": WAYS["quantized"],
    "kvpress": (
        FULL,
        *(f"{name}:keep=0.25" for name in (*PRESSES, ADAKV)),
        "snapkv-pool21:keep=0.88+quanto4",
    ),
    "kvzip": (FULL, "kvzip:keep=0.25"),
}


def asked(environment: str, setting: str, *, quick: bool) -> tuple[str, ...]:
    """The ways of an environment in a setting; in a quick run the first of each method."""
    if environment == KVZIP and setting == "aware":
        return ()
    if not quick:
        return WAYS[environment]
    first: dict[str, str] = {}
    for way in WAYS[environment]:
        first.setdefault(re.sub(r":[^+]*", "", way), way)
    return tuple(first.values())


def claimed(way: str) -> float | None:
    """The share that a way would hold if it let go of what it hides; None where nothing is hidden.

    >>> claimed("kvzip:keep=0.25")
    0.25
    >>> claimed("snapkv:keep=0.25")
    """
    name, _, kept = way.partition(":keep=")
    return float(kept) if name in (ADAKV, KVZIP) else None
