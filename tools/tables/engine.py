"""Names the ways to store of engines of vLLM, and writes what their rounds measured."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from tools.tables.markdown import Row

BF16: Final = "bf16"
FP8: Final = "fp8"
# What of a way, as results write it, is what of a policy; in this order.
SPELLED: Final = (
    (r"_(?=zack|kv_compress|k\dv\d)", "+"),
    (r"kv_compress", "kv-compress"),
    (r"_rate_", ":rate="),
    (r"_short_", ",short="),
    (r"(?<=\d)_(?=\d)", "."),
)
COUNTED: Final = ("cache", "most running", "preemptions", "steps of the engine")
SERVED: Final = (*COUNTED, "seconds", "tokens a second")


def policy(way: str) -> str:
    """Writes a way as a policy: `kv_compress_rate_4_k8v4` is `kv-compress:rate=4+k8v4`."""
    for old, new in SPELLED:
        way = re.sub(old, new, way)
    return f"`{way}`"


def compressed_first(named: str) -> str:
    """Names `kv-compress` before `zack` in a policy, as benchmarks ask for it."""
    return re.sub(r"(zack:[^+`]+)\+(kv-compress:[^+`]+)", r"\2+\1", named)


def cache(way: str) -> str:
    """Names a way in the first column."""
    return f"stock, {policy(way)}" if way in (BF16, FP8) else policy(way)


def by_way(rows: Iterable[Row], kind: str) -> dict[str, list[Row]]:
    """Gives the rows of a kind by way, rounds as they follow one another."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault(row["way"], []).append(row)
    return found


def every(rounds: Iterable[Row], key: str, form: str, scale: float = 1) -> str:
    """Writes what each round measured."""
    return " and ".join(f"{scale * row[key]:{form}}" for row in rounds)


def counted(rounds: Iterable[Row], key: str) -> str:
    """Writes what rounds counted, once where they agree."""
    return " and ".join(dict.fromkeys(f"{row[key]:,}" for row in rounds))


def share(value: float, digits: int) -> str:
    """Writes a share, as in `24.5 %`."""
    return f"{100 * value:.{digits}f} %"


def served(way: str, rounds: Sequence[Row]) -> tuple[str, ...]:
    """Writes how the same requests were served in all rounds."""
    return (
        cache(way),
        *(counted(rounds, key) for key in ("peak_running", "preemptions", "steps")),
        every(rounds, "seconds", ".0f"),
        every(rounds, "tokens_per_s", ".1f"),
    )
