"""The tables of the foundation, of compiled kernels, and of what methods cost on the host."""

from collections.abc import Iterator, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, only_figures, table

DOES: Final = {
    "accumulate": "adds to scores in pages",
    "close up": "closes up what tokens leave",
    "combine": "adds up parts by their log-sum-exps",
    "copy": "copies pages",
    "decode": "a decode step",
    "enter": "writes what arrives in a step",
    "gaps": "counts what leaves",
    "give": "page tables and the list of free pages, in a step",
    "leave": "takes out what leaves in a step",
    "look back": "what is observed of a prompt",
    "place": "writes vectors into a block",
    "plan": "shares out tiles of a decode step",
    "prompt": "attention of a prompt",
    "read": "reads tokens out of pages",
    "rescore": "writes scores",
    "watch": "what is observed of a decode step",
    "weakest": "lowest score of each stream",
    "write": "encodes a prompt into pages",
}
SHARES: Final = ("share", "observe_part_share", "score_layer_share", "plan_layers_share")


def spoken(kernel: str) -> str:
    """Names a kernel, as in `close up` for `close_up_kernel`."""
    return kernel.removesuffix("_kernel").replace("_", " ")


def compiled(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Writes how many there are, and the most registers and shared bytes that one takes."""
    registers = max(row["registers"] for row in rows)
    return f"{len(rows)}", f"{registers}", f"{max(row['shared'] for row in rows):,}"


def kernels(rows: Sequence[Row]) -> str:
    """Writes what the kernels do, and what they take on each architecture."""
    architectures = sorted({row["architecture"] for row in rows})
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((spoken(row["kernel"]), row["architecture"]), []).append(row)
    lines = (
        (
            kernel,
            DOES[kernel],
            *(part for on in architectures for part in compiled(found[kernel, on])),
        )
        for kernel in sorted({kernel for kernel, _ in found})
    )
    most = ("registers, at most", "bytes shared, at most")
    columns = (head for on in architectures for head in (f"for `{on}`", *most))
    return table(("kernel", "what it does", *columns), lines)


def triton_compile(result: Row, said: Said) -> Iterator[str]:
    """The figures, and what was compiled of each kernel."""
    yield markdown.figures(result, said)
    yield kernels(result["rows"])


def passes(rows: Sequence[Row]) -> str:
    """Writes what share of reading a prompt each policy takes, and of it each part."""
    lines = (
        (
            f"`{row['policy']}`",
            *(f"{row[share]:.4f}" for share in SHARES),
            f"{row['prefill_over_raw']:.3f}",
        )
        for row in rows
        if row["kind"] == "prompt"
    )
    parts = ("share of the prompt's pass", "of it observing", "scoring", "planning")
    return table(("policy", *parts, "whole pass over `raw`"), lines)


def kv_compress_cost(result: Row, said: Said) -> Iterator[str]:
    """The figures, and the shares of each policy."""
    yield markdown.figures(result, said)
    yield passes(result["rows"])


WRITERS: Final = {
    "foundation": only_figures,
    "triton_compile": triton_compile,
    "kv_compress_cost": kv_compress_cost,
    "leankv_overhead": only_figures,
}
