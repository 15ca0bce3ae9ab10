"""Tables of the foundation, of compiled kernels, and of the methods' cost on the host."""

from collections.abc import Iterator, Sequence
from typing import Final

from tools.tables import markdown
from tools.tables.markdown import Row, Said, only_figures, table

DOES: Final = {
    "accumulate": "accumulates scores in pages",
    "combine": "combines partial results by log-sum-exp",
    "compact": "compacts pages after eviction",
    "copy": "copies pages",
    "decode": "a decode step",
    "enter": "stores the new tokens of a step",
    "gaps": "counts evicted tokens",
    "gate": "scores of a gate",
    "give": "page tables and free list, in a step",
    "leave": "removes the evicted tokens of a step",
    "mass of pass": "attention mass of a prompt",
    "mass of step": "attention mass of a decode step",
    "place": "writes vectors into a block",
    "plan": "distributes the tiles of a decode step",
    "prompt": "attention of a prompt",
    "read": "reads tokens from pages",
    "rescore": "writes scores",
    "weakest": "lowest score of each head",
    "write": "encodes a prompt into pages",
}
SHARES: Final = ("share", "observe_part_share", "score_layer_share", "plan_layers_share")


def spoken(kernel: str) -> str:
    """Return a kernel's name, such as `mass of step` for `mass_of_step_kernel`."""
    return kernel.removesuffix("_kernel").replace("_", " ")


def compiled(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Write the number of kernels, and their maximum registers and shared bytes."""
    registers = max(row["registers"] for row in rows)
    return f"{len(rows)}", f"{registers}", f"{max(row['shared'] for row in rows):,}"


def kernels(rows: Sequence[Row]) -> str:
    """Write the purpose of each kernel, and its resources on each architecture."""
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
    """Yield the figures, and the compiled kernels."""
    yield markdown.figures(result, said)
    yield kernels(result["rows"])


def passes(rows: Sequence[Row]) -> str:
    """Write the share of prefill that each policy takes, and of its parts."""
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
    """Yield the figures, and the shares of each policy."""
    yield markdown.figures(result, said)
    yield passes(result["rows"])


def gpu_static(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the launches of a step by what launches, and the loops of kernels."""
    yield markdown.figures(result, said)
    rows = result["rows"]
    slots = [row for row in rows if row["kind"] == "launches"]
    yield table(
        ("decode step over slots", "kernels of Triton", "operations of torch, in all layers"),
        (
            (
                f"`{row['format']}`",
                *(
                    ", ".join(f"{count} {spoken(name)}" for name, count in row[of].items())
                    for of in ("triton", "torch")
                ),
            )
            for row in slots
        ),
    )
    yield table(
        ("decode kernel", "tokens of a tile", "instructions per 64 tokens", "registers", "shared"),
        (
            (
                f"`{row['format']}`",
                f"{row['block']}",
                f"{row['per_64_tokens']:.0f}",
                f"{row['registers']}",
                f"{row['shared']:,}",
            )
            for row in rows
            if row["kind"] == "kernel"
        ),
    )


def documents(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the file of each policy."""
    cells = {
        "file over bytes held": "{file_over_held:.4f}",
        "over an uncompressed cache": "{file_over_full:.4f}",
        "loading over prefill": "{load_over_prefill:.4f}",
        "for 16 questions": "{repeated_over_one:.2f}",
        "answered": "{answered_over_one:.2f}",
    }
    yield from markdown.by_policy(result, said, cells)


def documents_joined(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, and the shares found of each policy with the number in either document."""
    share = "{{{0}:.3f}} ({{{0}_interval[0]:.3f}} to {{{0}_interval[1]:.3f}})"
    cells = {
        "number in the": "{number_in}",
        "one after another": share.format("joined"),
        "one text": share.format("one_text"),
        "change": "{change[0]:+.3f} to {change[1]:+.3f}",
    }
    yield from markdown.by_policy(result, said, cells)


def kld(result: Row, said: Said) -> Iterator[str]:
    """Yield the divergence, the nats and the bytes of each policy."""
    cells = {
        "divergence, nats": "{kl:.4f}",
        "95 %": "{kl_interval[0]:.4f} to {kl_interval[1]:.4f}",
        "99.9 % quantile": "{kl_tail:.3f}",
        "nats per token, added": "{over_full:+.4f}",
        "95 % of that": "{interval[0]:+.4f} to {interval[1]:+.4f}",
        "bytes": "{bytes:.3f}",
    }
    yield markdown.policies((row for row in result["rows"] if "kl" in row), cells)


WRITERS: Final = {
    "documents": documents,
    "documents_joined": documents_joined,
    "foundation": only_figures,
    "gpu": only_figures,
    "gpu_static": gpu_static,
    "triton_compile": triton_compile,
    "kld": kld,
    "kv_compress_cost": kv_compress_cost,
    "leankv_overhead": only_figures,
}
