"""Tables of native CPU code."""

from collections.abc import Iterator, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, only_figures, table

DECODED: Final = {
    "vllm_fp8": "vLLM fp8",
    "sdpa_bf16": "SDPA bf16",
    "raw": "`raw`",
    "k8v4": "`k8v4`",
    "k4v2": "`k4v2`",
    "mix_20_80": "20:80",
    "k8v4_page_16": "`k8v4`, 16 a page",
    "raw_huge_pages": "`raw`, huge pages",
    "k8v4_huge_pages": "`k8v4`, huge pages",
    "k4v2_huge_pages": "`k4v2`, huge pages",
    "mix_20_80_huge_pages": "20:80, huge pages",
}
READERS: Final = ("read", "vllm_bf16", "vllm_fp8", "sdpa_bf16", "raw", "k8v4", "k4v2", "mix_20_80")
READ_SIZE: Final = (4, 16384)  # sequences, and tokens of each
PEERS: Final = {
    "vllm_bf16": "vLLM's own kernel over its bfloat16 pages",
    "sdpa_bf16": "torch's fused kernel over plain bfloat16",
}
CODE: Final = {"cpu": "native code", "torch": "torch"}
THREADS: Final = {1: "one thread", 2: "two threads"}
OBSERVED: Final = {
    "last, torch": "last 64, torch",
    "last, native": "native",
    "all, torch": "all, torch",
    "all, native": "native",
    "all, added": "with native attention",
}


def speeds(rows: Sequence[Row]) -> str:
    """Write how much faster than vLLM's kernel each variant decodes, by size."""
    ratios = {
        (row["threads"], row["sequences"], row["tokens"], row["variant"]): row["vs_vllm_bf16"]
        for row in rows
    }
    decoded = [name for name in DECODED if name in {key[3] for key in ratios}]
    lines = (
        (
            f"{threads}",
            f"{batch}",
            f"{tokens:,}",
            *(f"{ratios[threads, batch, tokens, variant]:.2f}" for variant in decoded),
        )
        for threads, batch, tokens in sorted({key[:3] for key in ratios})
    )
    return table(("threads", "batch", "tokens", *(DECODED[name] for name in decoded)), lines)


def bandwidths(rows: Sequence[Row]) -> str:
    """Write the bandwidth of each variant, at one size."""
    chosen = [
        row
        for row in rows
        if (row["sequences"], row["tokens"]) == READ_SIZE and row["variant"] in READERS
    ]
    chosen.sort(key=lambda row: (row["threads"], READERS.index(row["variant"])))
    lines = (
        (
            f"{row['threads']}",
            row["variant"].replace("_", " "),
            f"{row['gb_per_s']:.1f}",
            f"{row['share_of_bandwidth']:.2f}",
        )
        for row in chosen
    )
    return table(("threads", "variant", "GB/s", "of the bandwidth"), lines)


def cpu_decode(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the speeds by size, and the bandwidths."""
    yield markdown.figures(result, said)
    yield speeds(result["rows"])
    yield bandwidths(result["rows"])


def generated(rows: Sequence[Row]) -> str:
    """Write how fast a model generates with each cache, and the cache's bytes."""
    lines = (
        (
            f"{row['batch']}",
            f"{row['tokens']:,}",
            f"`{row['spec']}`",
            f"{row['tokens_per_s']:.1f}",
            f"{row['kv_bytes'] / 2**20:.0f} MiB",
            f"{row['ratio']:.2f}x",
        )
        for row in rows
        if row["kind"] == "decode"
    )
    head = ("batch", "tokens", "cache", "tokens a second", "KV bytes held")
    return table((*head, "over transformers' own"), lines)


def observing(spec: str) -> str:
    """Return a description of the policy that a prompt was observed for."""
    return "transformers' own cache" if spec == "full" else f"as `{spec}` asks"


def observed(rows: Sequence[Row]) -> str:
    """Write the cost of observing a prompt, relative to no observation."""
    lines = (
        (f"{row['tokens']:,}", observing(row["observes"]), f"{row['ratio']:.3f}")
        for row in rows
        if row["kind"] == "prompt" and row["observes"] != "nothing"
    )
    return table(("tokens", "observed of the prompt", "over observing nothing"), lines)


def cpu_end_to_end(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the generation speeds, and the cost of observing a prompt."""
    yield markdown.figures(result, said)
    yield generated(result["rows"])
    yield observed(result["rows"])


def attended_by(variant: str) -> str:
    """Return the implementation that attends a prompt chunk, with its pages if it is ours."""
    if variant in PEERS:
        return PEERS[variant]
    form, _, backend = variant.partition("_")
    return f"{CODE[backend]}, {'nothing stored' if form == 'fresh' else f'`{form}` pages'}"


def timed(row: Row) -> tuple[str, str, str]:
    """Write a chunk's milliseconds, its speed over vLLM's kernel's, and the quartiles of that."""
    low, high = row["vs_vllm_bf16_quartiles"]
    return f"{1e3 * row['seconds']:.1f}", f"{row['vs_vllm_bf16']:.2f}", f"{low:.2f} to {high:.2f}"


def heads_of(row: Row) -> str:
    """Write the heads of a prompt's layer; results without them are of SmolLM2-135M."""
    return f"{row.get('heads', 9)} / {row.get('kv_heads', 3)} of {row.get('dim', 64)}"


def chunks(rows: Sequence[Row]) -> str:
    """Write how long each variant takes for each chunk, on one thread and on two."""
    found = {
        (heads_of(row), row["chunk"], row["before"], row["variant"], row["threads"]): row
        for row in rows
    }
    lines = (
        (
            heads,
            f"{chunk:,}",
            f"{before:,}",
            attended_by(variant),
            *(
                part
                for count in THREADS
                for part in timed(found[heads, chunk, before, variant, count])
            ),
        )
        for heads, chunk, before, variant in dict.fromkeys(key[:4] for key in found)
    )
    columns = (head for on in THREADS.values() for head in (f"ms, {on}", "speed", "quartiles"))
    return table(("heads", "chunk", "stored", "attended by", *columns), lines)


def cpu_prefill(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the times of all variants."""
    yield markdown.figures(result, said)
    yield chunks(result["rows"])


def overheads(rows: Sequence[Row]) -> str:
    """Write the median overhead of observation per pass."""
    chosen = sorted(rows, key=lambda row: row["tokens"])
    lines = (
        (
            f"{row['tokens']}",
            f"{row['heads']} x {row['group']} of {row['dim']}",
            row["dtype"],
            *(f"{median:.3f}" for _, median, _ in (row[way] for way in OBSERVED)),
        )
        for row in chosen
    )
    return table(("tokens", "heads", "dtype", *OBSERVED.values()), lines)


def cpu_scores(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the overhead of observation at each size."""
    yield markdown.figures(result, said)
    yield overheads(result["rows"])


def scorings(rows: Sequence[Row]) -> str:
    """Write how long each scores a prompt of one layer, or a decode step of all layers."""
    lines = (
        (
            "prompt" if row["pass"] == "prompt" else "decode step",
            f"{row['layers']} x {row['heads']} of {row['dim']}",
            f"{row['tokens']:,}",
            f"{1e3 * row['torch_s']:.2f}",
            f"{1e3 * row['native_s']:.2f}",
            f"{low:.2f} to {high:.2f}",
        )
        for row in rows
        for low, _, high in (row["native_over_torch"],)
    )
    return table(("pass", "layers, heads", "tokens", "torch, ms", "native, ms", "ratio"), lines)


def gate_score(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the milliseconds of each pass."""
    yield markdown.figures(result, said)
    yield scorings(result["rows"])


def _ranked(variant: str) -> str:
    """Say what ranks pages, and the share that is read: `codes_12` is `codes, 12.5 %`."""
    by, share = variant.split("_")
    exact = {"6": "6.25", "12": "12.5"}.get(share, share)
    return f"{'bounds' if by == 'quest' else by}, {exact} %"


def quest_speed(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the speedups by size, page and share of the pages read."""
    yield markdown.figures(result, said)
    shares = [name for name in dict.fromkeys(row["variant"] for row in result["rows"])]
    shares = [name for name in shares if name.startswith(("quest_", "codes_"))]
    found = {
        (row["threads"], row["sequences"], row["tokens"], row["page"], row["variant"]): row
        for row in result["rows"]
    }
    lines = (
        (*(f"{x:,}" for x in size), *(f"{found[*size, name]['over_full']:.2f}" for name in shares))
        for size in sorted({key[:4] for key in found})
    )
    read = (_ranked(name) for name in shares)
    yield table(("threads", "batch", "tokens", "page", *read), lines)


WRITERS: Final = {
    "cpu_decode": cpu_decode,
    "quest_speed": quest_speed,
    "cpu_decode_amx": cpu_decode,
    "cpu_end_to_end": cpu_end_to_end,
    "cpu_isa": only_figures,
    "cpu_isa_amx": only_figures,
    "cpu_prefill": cpu_prefill,
    "cpu_prefill_amx": cpu_prefill,
    "cpu_scores": cpu_scores,
    "cpu_store": only_figures,
    "decode_before": only_figures,
    "gate_score": gate_score,
}
