"""Names of vLLM engine configurations, and the cells of their measured rounds."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from tools.tables.markdown import Row

BF16: Final = "bf16"
FP8: Final = "fp8"
# Substitutions from a configuration's name in results to a policy text; in this order.
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
    """Return a configuration's policy: `kv_compress_rate_4_k8v4` is `kv-compress:rate=4+k8v4`."""
    for old, new in SPELLED:
        way = re.sub(old, new, way)
    return f"`{way}`"


def compressed_first(named: str) -> str:
    """Return a policy with `kv-compress` before `zack`, as benchmarks order them."""
    return re.sub(r"(zack:[^+`]+)\+(kv-compress:[^+`]+)", r"\2+\1", named)


def cache(way: str) -> str:
    """Return the text of the first column."""
    return f"stock, {policy(way)}" if way in (BF16, FP8) else policy(way)


def by_way(rows: Iterable[Row], kind: str) -> dict[str, list[Row]]:
    """Return the rows of a kind by configuration, rounds in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == kind:
            found.setdefault(row["way"], []).append(row)
    return found


def every(rounds: Iterable[Row], key: str, form: str, scale: float = 1) -> str:
    """Write the measurement of each round."""
    return " and ".join(f"{scale * row[key]:{form}}" for row in rounds)


def counted(rounds: Iterable[Row], key: str) -> str:
    """Write the counts of the rounds, once if they agree."""
    return " and ".join(dict.fromkeys(f"{row[key]:,}" for row in rounds))


def share(value: float, digits: int) -> str:
    """Write a share, as in `24.5 %`."""
    return f"{100 * value:.{digits}f} %"


def served(way: str, rounds: Sequence[Row]) -> tuple[str, ...]:
    """Write how the same requests were served in all rounds."""
    return (
        cache(way),
        *(counted(rounds, key) for key in ("peak_running", "preemptions", "steps")),
        every(rounds, "seconds", ".0f"),
        every(rounds, "tokens_per_s", ".1f"),
    )
