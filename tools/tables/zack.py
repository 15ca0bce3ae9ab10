"""Tables of ZACK: removable dimensions, transfer of a basis between texts, and savings."""

from collections.abc import Iterator, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, table

RATES: Final = (0.0, 0.0625, 0.125, 0.25)
PAIRS: Final = ("Q-K", "V-O")
DRIFT_RATE: Final = 0.25
POLICIES: Final = ("bytes", "policy", "needle", "multikey", "nats per token")
TEXTS: Final = (
    "basis",
    "text",
    "lost beyond its own, Q-K",
    "V-O",
    "subspace outside, Q-K",
    "V-O",
    "elements, Q-K",
    "V-O",
)
TOKENS: Final = ("tokens", "lost beyond its own, Q-K", "V-O", "subspace outside, Q-K", "V-O")
DECODE: Final = ("heads", "batch", "tokens", "ranks", "rate", "decode", "with maps", "bytes")
PROJECTIONS: Final = (
    "layers",
    "tokens",
    "rate",
    "v and o folded",
    "with packing",
    "all four, rotation included",
    "bytes of v and o",
)


def of_kind(result: Row, kind: str) -> list[Row]:
    """Return the rows of a kind."""
    return [row for row in result["rows"] if row["kind"] == kind]


def asked(policy: str) -> float:
    """Return the rate that a policy requests, which ranks in multiples can miss."""
    _, _, rest = policy.partition("rate=")
    return float(rest.partition(",")[0])


def greatest(tried: Sequence[Row]) -> float:
    """Return the highest rate of a method within 1 % of the nats; 0 if there is none."""
    return max((row["removed"] for row in tried if row["within"]), default=0.0)


def searched(method: str, tried: Sequence[Row]) -> tuple[str, ...]:
    """Write the removable share of a method, and its nats at some of the tried rates."""
    nats = {asked(row["policy"]): f"{row['nats']:.3f}" for row in tried}
    # A search that moves up skips the smaller rates.
    return (f"{greatest(tried):.3f}", f"`{method}`", *(nats.get(rate, "") for rate in RATES))


def search(rows: Sequence[Row]) -> str:
    """Write the search for the highest rate, a row for each method."""
    tried = [row for row in rows if "method" in row]
    methods = dict.fromkeys(row["method"] for row in tried)
    of = {method: [row for row in tried if row["method"] == method] for method in methods}
    first, *others = RATES
    head = ("greatest rate within 1 %", "method", f"rate {first:g}", *map(str, others))
    return table(head, (searched(*each) for each in of.items()))


def policy(row: Row) -> tuple[str, ...]:
    """Write a policy's bytes and scores."""
    scores = [f"{row[task]:.2f}" for task in ("needle", "multikey")]
    return (f"{row['bytes']:.3f}", f"`{row['policy']}`", *scores, f"{row['nll']:.3f}")


def drift(row: Row) -> tuple[str, ...]:
    """Write the excess energy that a basis loses over another, and the angle between them."""
    lost = [f"{row[f'{pair} excess']:.5f}" for pair in PAIRS]
    return (*lost, *(f"{row[f'{pair} turned']:.3f}" for pair in PAIRS))


def elements(row: Row) -> tuple[str, ...]:
    """Write the relative differences of the rotations' elements."""
    return tuple(f"{row[f'{pair} elements']:.2f}" for pair in PAIRS)


def zack_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the rate search, policies, and bases of other texts and fewer tokens."""
    yield markdown.figures(result, said)
    yield search(of_kind(result, "rate"))
    yield table(POLICIES, (policy(row) for row in of_kind(result, "policy")))
    texts = [row for row in of_kind(result, "drift") if row["rate"] == DRIFT_RATE]
    yield table(TEXTS, ((row["basis"], row["text"], *drift(row), *elements(row)) for row in texts))
    fewer = [row for row in of_kind(result, "tokens") if row["rate"] == DRIFT_RATE]
    yield table(TOKENS, ((f"{row['tokens']:,}", *drift(row)) for row in fewer))


def decode(row: Row) -> tuple[str, ...]:
    """Write a decode step's attention with fewer dimensions relative to all of them."""
    ratios = ("decode_ratio", "decode_ratio_with_maps", "memory_ratio")
    about = (row["model"], f"{row['batch']}", f"{row['tokens']:,}", row["ranks"])
    return (*about, f"{row['rate']:g}", *(f"{row[ratio]:.2f}" for ratio in ratios))


def projections(row: Row) -> tuple[str, ...]:
    """Write folded projections relative to their originals."""
    ratios = (
        "projection_ratio",
        "projection_ratio_with_packing",
        "all_projections_ratio",
        "memory_ratio",
    )
    about = (row["model"], f"{row['tokens']:,}", f"{row['rate']:g}")
    return (*about, *(f"{row[ratio]:.2f}" for ratio in ratios))


def zack_speed(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, decode steps, and projections."""
    yield markdown.figures(result, said)
    yield table(DECODE, (decode(row) for row in of_kind(result, "decode")))
    yield table(PROJECTIONS, (projections(row) for row in of_kind(result, "projections")))


def zack_folded(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and decode steps of both checkpoints."""
    yield markdown.figures(result, said)
    yield table(
        ("host", "ranks", "checkpoint", "sequences", "step, ms", "over `raw`"),
        (
            (
                "vLLM" if row["host"] == "vllm" else row["host"],
                row["ranks"],
                row["checkpoint"],
                f"{row['batch']}",
                f"{row['ms']:.1f}",
                f"{row['over_raw']:.3f}",
            )
            for row in of_kind(result, "steps")
        ),
    )


WRITERS: Final = {
    "zack_folded": zack_folded,
    "zack_quality": zack_quality,
    "zack_speed": zack_speed,
}
