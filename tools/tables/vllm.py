"""Tables of vLLM engines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.engine import (
    BF16,
    COUNTED,
    FP8,
    SERVED,
    by_way,
    cache,
    compressed_first,
    every,
    policy,
    served,
    share,
)
from tools.tables.markdown import Row, Said, table

HOSTS: Final = ("transformers", "vllm")
OWN: Final = {BF16: "vLLM's own cache in bfloat16", FP8: "vLLM's own cache in fp8"}
ASKED: Final = {"needle": "needles", "multikey": "multikey"}
PARTS: Final = ("attention", "storing", "model", "engine")


def sizes(rows: Iterable[Row]) -> str:
    """Write the capacity that vLLM reports."""
    lines = (
        (
            cache(row["way"]),
            f"{row['tokens']:,}",
            f"{row['concurrency']:.2f}",
            f"{row['blocks']:,}",
            f"{row['block_tokens']} tokens",
        )
        for row in rows
        if row["kind"] == "size"
    )
    return table(("cache", "tokens", "requests", "blocks", "a block holds"), lines)


def load(rows: Iterable[Row], name: str) -> str:
    """Write how a load was served."""
    lines = (
        (
            cache(row["way"]),
            f"{row['peak_running']}",
            f"{row['preemptions']}",
            f"{row['steps']}",
            share(row["peak_usage"], 0),
        )
        for row in rows
        if row["kind"] == "load" and row["load"] == name
    )
    return table((*COUNTED, "most of the blocks in use"), lines)


def vllm_capacity(result: Row, said: Said) -> Iterator[str]:
    """Yield the capacity that vLLM reports, and how each load was served."""
    yield markdown.figures(result, said)
    yield sizes(result["rows"])
    for name in ("prompts", "answers"):
        yield load(result["rows"], name)


def loaded(rows: Sequence[Row]) -> str:
    """Write the number of correct answers of a loaded engine."""
    runs = [row for row in rows if row["kind"] == "loaded"]
    scores = {(row["task"], row["way"]): row for row in rows if row["kind"] == "score"}
    lines = (
        (
            cache(row["way"]),
            *(
                each
                for task in ASKED
                for each in (right(row[task]), within(scores[task, row["way"]]))
            ),
            f"{row['peak_running']}",
            f"{row['preemptions']}",
        )
        for row in runs
    )
    asked = (f"{head} of {len(runs[0][task])}" for task, head in ASKED.items())
    heads = (each for head in asked for each in (head, "95 %"))
    return table(("cache", *heads, "most running", "preemptions"), lines)


def within(row: Row) -> str:
    """Write the confidence interval of a share."""
    low, high = row["interval"]
    return f"{low:.2f} to {high:.2f}"


def right(scores: Sequence[float] | None) -> str:
    """Write the number of correct answers, if any were measured."""
    return "" if scores is None else f"{sum(scores):.0f}"


def vllm_loaded(result: Row, said: Said) -> Iterator[str]:
    """Yield the answers of a loaded engine."""
    yield markdown.figures(result, said)
    yield loaded(result["rows"])


def over(row: Row, key: str) -> str:
    """Write a difference in nats with its interval; fp8 exists under vLLM only."""
    if row["way"] == BF16 and key != "between":  # the baseline itself
        return "none"
    if key not in row:
        return "not there"
    low, high = row[f"{key}_interval"]
    return f"{row[key]:+.3f} ({low:+.3f} to {high:+.3f})"


def vllm_nll(result: Row, said: Said) -> Iterator[str]:
    """Yield nats relative to the uncompressed cache of each host, and between the hosts."""
    yield markdown.figures(result, said)
    columns = {
        "vllm": "over bf16 under vLLM",
        "transformers": "over `full` under transformers",
        "between": "vLLM over transformers",
    }
    lines = (
        (cache(row["way"]), *(over(row, key) for key in columns))
        for row in result["rows"]
        if row["kind"] == "over"
    )
    yield table(("cache", *columns.values()), lines)


def parts(rows: Iterable[Row]) -> str:
    """Write how the time of a run is spent."""
    keys = [f"{part}_{step}" for step in ("prompt", "decode") for part in PARTS]
    lines = (
        (cache(row["way"]), f"{row['seconds']:.1f} s", *(share(row[key], 1) for key in keys))
        for row in rows
        if row["kind"] == "parts"
    )
    first, *others = PARTS
    steps = (f"steps with prompts: {first}", *others, f"steps that decode: {first}", *others)
    return table(("cache", "all", *steps), lines)


def vllm_parts(result: Row, said: Said) -> Iterator[str]:
    """Yield how short answers were served, and how the time is spent."""
    yield markdown.figures(result, said)
    runs = by_way(result["rows"], "served")
    yield table(SERVED, (served(way, rounds) for way, rounds in runs.items()))
    yield parts(result["rows"])


def beside(theirs: Row, way: str) -> Sequence[float] | None:
    """Return the scores of transformers; fp8 exists under vLLM only."""
    scores: Sequence[float] | None = theirs.get("full" if way == BF16 else way)
    return scores


def quality(rows: Sequence[Row]) -> str:
    """Write the correct answers under both hosts."""
    ours = {row["way"]: row for row in rows if row["kind"] == "vllm"}
    theirs = {row["task"]: row for row in rows if row["kind"] == "transformers"}
    lines = (
        (
            OWN.get(way) or compressed_first(policy(way)),
            *(right(each) for task in ASKED for each in (mine[task], beside(theirs[task], way))),
        )
        for way, mine in ours.items()
    )
    heads = (each for head in ASKED.values() for each in (f"{head}, vLLM", "transformers"))
    return table(("cache", *heads), lines)


def vllm_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield answers under vLLM and under transformers.

    Its nats are left out: vLLM scores tokens of a prompt before anything of it is evicted, so they
    do not measure eviction. `vllm_nll` has those of generated tokens.
    """
    answers = {k: v for k, v in result["summary"].items() if not k.startswith("nll_")}
    yield markdown.figures({**result, "summary": answers}, said)
    yield quality(result["rows"])


def worked(row: Row) -> tuple[str, ...]:
    """Write a row of prompts or steps: its median, and the shares of attention and of ours."""
    shares = (f"{100 * row[key]:.1f} %" if key in row else "" for key in ("attention", "own"))
    size = f"{row['batch']} of {row['tokens']:,} tokens"
    milliseconds = f"{1000 * row['median']:.1f}"
    return (
        row["kind"],
        row["mode"],
        size,
        compressed_first(cache(row["way"])),
        milliseconds,
        *shares,
    )


def vllm_steps(result: Row, said: Said) -> Iterator[str]:
    """Yield the median of prompts and steps of each engine, and what is ours in them."""
    yield markdown.figures(result, said)
    head = ("what", "mode", "requests", "cache", "ms", "layers and metadata", "ours beside kernels")
    yield table(head, map(worked, result["rows"]))


def vllm_quest(result: Row, said: Said) -> Iterator[str]:
    """Yield the median of steps of each engine, and the share of attention in them."""
    yield markdown.figures(result, said)
    lines = (
        (
            f"{row['batch']} of {row['tokens']:,} tokens",
            cache(row["way"]),
            f"{1000 * row['median']:.1f}",
            share(row["attention"], 1),
        )
        for row in result["rows"]
    )
    yield table(("requests", "cache", "ms", "layers and metadata"), lines)


def vllm_soak(result: Row, said: Said) -> Iterator[str]:
    """Yield the outcome of the requests of each engine."""
    yield markdown.figures(result, said)
    columns = {
        "requests": "requests",
        "answered": "answered",
        "aborted": "aborted",
        "preemptions": "preemptions",
        "steps": "steps of the engine",
    }
    lines = (
        (
            compressed_first(cache(row["way"])),
            *(f"{row[key]:,}" for key in columns),
            f"{row['leaked_blocks']} blocks",
        )
        for row in result["rows"]
    )
    yield table(("cache", *columns.values(), "leaked blocks"), lines)


def vllm_throughput(result: Row, said: Said) -> Iterator[str]:
    """Yield how long answers were served."""
    yield markdown.figures(result, said)
    lines = (
        (*served(way, rounds), every(rounds, "full_tokens_per_s", ".1f"))
        for way, rounds in by_way(result["rows"], "served").items()
    )
    yield table((*SERVED, "while requests waited"), lines)


def vllm_gate(result: Row, said: Said) -> Iterator[str]:
    """Yield what fits, and how the same requests were served."""
    yield markdown.figures(result, said)
    sizes = {row["way"]: row for row in result["rows"] if row["kind"] == "size"}
    named = {way: f"stock, `{way}`" if way in OWN else f"`{sizes[way]['policy']}`" for way in sizes}
    lines = (
        (named[way], f"{sizes[way]['tokens']:,}", *served(way, rounds)[1:])
        for way, rounds in by_way(result["rows"], "served").items()
    )
    yield table(("cache", "tokens that fit", *SERVED[1:]), lines)


def vllm_trace(result: Row, said: Said) -> Iterator[str]:
    """Yield how requests of a trace were served."""
    yield markdown.figures(result, said)
    cells: dict[tuple[str, int], list[Row]] = {}
    for row in result["rows"]:
        if row["kind"] == "trace":
            cells.setdefault((row["way"], row["chunk"]), []).append(row)
    lines = (
        (
            cache(way),
            str(chunk),
            *(f"{every(rounds, f'ttft_{p}', '.1f')} s" for p in ("p50", "p99")),
            *(f"{every(rounds, f'tbt_{p}', '.0f', scale=1000)} ms" for p in ("p50", "p99")),
            f"{every(rounds, 'good_requests', 'd')} of {rounds[0]['requests']}",
            every(rounds, "goodput", ".3f"),
            f"{every(rounds, 'output_tokens_per_s', '.1f')} tokens/s",
        )
        for (way, chunk), rounds in cells.items()
    )
    waits = ("first token, p50", "p99", "between tokens, p50", "p99")
    columns = ("cache", "tokens of a step", *waits, "within targets", "a second", "output")
    yield table(columns, lines)


def vllm_prefill(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the seconds until the first token of each way."""
    yield markdown.figures(result, said)
    rows = result["rows"]
    names = {row["way"]: cache(row["way"]) for row in rows}
    over = {"stock": names[BF16], "k8v4": names["k8v4"]}
    lines = (
        (
            names[row["way"]],
            f"{row['median']:.2f} s",
            "" if row["way"] == BF16 else over[row["over"]],
            "" if row["way"] == BF16 else " ".join(f"{each:.3f}" for each in row["ratio"]),
        )
        for row in rows
    )
    yield table(("cache", "first token", "compared with", "ratio, quartiles of the rounds"), lines)


def vllm_models(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and what each model with several kinds of layers does."""
    yield markdown.figures(result, said)
    names = list(dict.fromkeys(row["model"] for row in result["rows"]))
    stored = {(row["model"], row["stored"]): row for row in result["rows"]}
    ways = {row["stored"]: row["way"] for row in result["rows"]}
    heads = (head for way in ways.values() for head in ("all kept", f"`{way}`", "by bytes"))
    yield table(
        ("model", "tokens, stock", *heads, "a block holds"),
        (models_line(name, [stored[name, each] for each in ways]) for name in names),
    )


def models_line(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Write a model's line: its tokens and its capacity in each way of storing tokens."""
    stock = f"{rows[0]['stock']:,}" if rows[0]["runs"] else ""
    each = (cell for row in rows for cell in (said_of(row), *capacity(row)))
    blocks = " and ".join(f"{x}" for x in rows[0]["block_tokens"]) if rows[0]["runs"] else ""
    return f"`{name}`", stock, *each, blocks


def said_of(row: Row) -> str:
    """Write whether tokens are those of vLLM alone, or who refuses the model."""
    if not row["runs"]:
        return "vLLM fails" if row["refused_by"] == "vLLM" else "refused"
    return "equal" if row["equal"] else "differ"


def capacity(row: Row) -> tuple[str, ...]:
    """Write the capacity that vLLM reports, and that of the formula."""
    if not row["runs"]:
        return ("",) * 2
    return f"{row['stated']:,}", f"{row['formula']:,.0f}"


def hybrid_quality(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and what is found of each task by each host, with intervals."""
    yield markdown.figures(result, said)
    cells = {
        (row["model"], row["way"], row["task"], row["host"]): row
        for row in result["rows"]
        if row["kind"] == "cell"
    }
    columns = [(task, host) for task in ("needle", "multikey") for host in HOSTS]
    lines = (
        (
            model,
            "full" if way == "full" else policy(way),
            f"{cells[model, way, 'needle', HOSTS[0]]['bytes']:.3f}",
            *(cell_share(cells.get((model, way, *column))) for column in columns),
        )
        for model, way in dict.fromkeys(key[:2] for key in cells)
    )
    heads = (f"{task}, {host}" for task, host in columns)
    yield table(("windows", "cache", "bytes", *heads), lines)


def cell_share(cell: Row | None) -> str:
    """Write a share and its interval."""
    return "" if cell is None else f"{cell['mean']:.3f} ({within(cell)})"


def vllm_documents(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and what each policy read and held."""
    cells = {
        "first token, warm over cold": "{warm_over_cold:.4f}",
        "bytes for one question": "{one_bytes:,}",
        "for 16": "{sharers_bytes:,}",
        "prompt tokens of the chat": "{chat_whole:,}",
        "read": "{chat_read:,}",
    }
    yield from markdown.by_policy(result, said, cells)


def of_kind(rows: Iterable[Row], kind: str, cells: Mapping[str, str]) -> str:
    """Write a line for each row of a kind: its cache, and the formats of `cells` by their heads."""
    lines = (
        (cache(row["policy"]), *(cell.format_map(row) for cell in cells.values()))
        for row in rows
        if row["kind"] == kind
    )
    return table(("cache", *cells), lines)


def engine(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the rows of each kind, and the versions of vLLM."""
    yield markdown.figures(result, said)
    rows = result["rows"]
    tokens = {"tokens": "{tokens:,}", "equal": "{identical:,}"}
    drafted = {"drafted": "{drafted:,}", "accepted": "{accepted:,}"}
    yield of_kind(rows, "drafts", tokens | drafted)
    found = {"prompt tokens in memory": "{cached:,}", "from the host": "{restored:,}"}
    held = {"tokens in a GiB of the host": "{tokens_per_gib:,.0f}"}
    yield of_kind(rows, "offload", tokens | found | held)
    peak = (
        {**row, "peak": row["blocks"] * row["block_tokens"]}
        for row in rows
        if row["kind"] == "reading"
    )
    sizes = {"prompt": "{tokens:,}", "budget": "{budget:,}", "a chunk": "{chunk:,}"}
    room = {"most that it held": "{peak:,}", "memory, uncompressed": "{held:,}"}
    yield of_kind(peak, "reading", sizes | room)
    yield versions(rows)


def versions(rows: Sequence[Row]) -> str:
    """Write what tests in each version of vLLM said, and the comparison of its sources."""
    kinds = {"version": ("passed", "failed", "skipped"), "upstream": ("compared", "differ")}
    known = {(row["version"], row["kind"]): row for row in rows if row["kind"] in kinds}
    empty: Row = {}
    lines = (
        (
            version,
            *(
                f"{row[key]:,}" if row else ""
                for kind, keys in kinds.items()
                for row in (known.get((version, kind), empty),)
                for key in keys
            ),
        )
        for version in dict.fromkeys(version for version, _ in known)
    )
    tests = (f"tests that {each}" for each in ("passed", "failed", "were skipped"))
    return table(("vLLM", *tests, "interfaces and names compared", "differ"), lines)


WRITERS: Final = {
    "engine": engine,
    "hybrid_quality": hybrid_quality,
    "vllm_capacity": vllm_capacity,
    "vllm_documents": vllm_documents,
    "vllm_gate": vllm_gate,
    "vllm_loaded": vllm_loaded,
    "vllm_models": vllm_models,
    "vllm_nll": vllm_nll,
    "vllm_parts": vllm_parts,
    "vllm_prefill": vllm_prefill,
    "vllm_quality": vllm_quality,
    "vllm_quest": vllm_quest,
    "vllm_soak": vllm_soak,
    "vllm_steps": vllm_steps,
    "vllm_steps_amx": vllm_steps,
    "vllm_throughput": vllm_throughput,
    "vllm_throughput_amx": vllm_throughput,
    "vllm_trace": vllm_trace,
}
