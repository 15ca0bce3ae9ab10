# environment: vllm
"""Decode attention on a CPU: our pages beside vLLM's own paged kernel and torch's SDPA.

One layer of 32 query heads over 8 KV heads of 128 dimensions, queries in bfloat16, pages in random
order. A row is one process's median over rounds in which all variants take turns; a ratio is the
median over rounds of vLLM's seconds in bfloat16 over the variant's. Bytes are codes and scales, or
numbers of 2 bytes; the share of bandwidth is bytes per second over those of summing a long tensor
in the same rounds. Memory is in pages of 4 KiB of the system; `huge_pages` are the same tokens in
huge pages, which pools of pages ask for and vLLM does not. On a processor with AMX the result is
`cpu_decode_amx`.
"""

import argparse
import math
import time
from collections.abc import Callable
from itertools import product

import _result
import torch
from _cpu_tokens import Heads, random_vectors, stored, tiers, token_bytes
from _timing import Turns, timed
from _vllm_kernel import decode as vllm_decode
from rich.console import Console
from torch import Tensor

from kv_attention import attend
from kv_cpu import chosen, runnable
from kv_policy import Observe, PagedTokens

HEADS = Heads(query=32, kv=8, dim=128)
FORMATS = {
    "raw": [("raw", 1.0)],
    "k8v4": [("k8v4", 1.0)],
    "k4v2": [("k4v2", 1.0)],
    "mix_20_80": [("k8v4", 0.2), ("k4v2", 0.8)],
}
HUGE = "_huge_pages"  # the same pages in huge pages of the system, as a pool's are
WATCHED = {
    "k8v4_sum": Observe(1, "sum"),
    "k8v4_square": Observe(1, "sum", 2),
    "k8v4_max": Observe(1, "max"),
}
NOTHING = Observe()
READ_BYTES = 1 << 28
SIZES = list(product((1, 4, 16), (1024, 4096, 16384, 32768)))
CONSOLE = Console(stderr=True)
Step = Callable[[], Tensor]


class Variants:
    """All ways to take a decode step over the same tokens, by name, and the bytes each reads."""

    def __init__(self, sequences: int, tokens: int) -> None:
        """Store the tokens in every format."""
        key, value = random_vectors(HEADS, sequences, tokens)
        lead = (sequences, HEADS.kv, HEADS.group)
        query = torch.randn(*lead, HEADS.dim).to(torch.bfloat16)
        place = torch.full((sequences, 1), tokens)
        wide = 2 * key.numel() * 2
        self.steps: dict[str, Step] = {
            "vllm_bf16": vllm_decode(query, key, value, "auto"),
            "vllm_fp8": vllm_decode(query, key, value, "fp8"),
            "sdpa_bf16": lambda: torch.nn.functional.scaled_dot_product_attention(
                query, key, value
            ),
        }
        self.bytes = {"vllm_bf16": wide, "vllm_fp8": wide // 2, "sdpa_bf16": wide}

        exact = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float()
        )
        self.exact = dict.fromkeys(self.steps, exact)

        def ours(name: str, pages: list[PagedTokens], observe: Observe = NOTHING) -> None:
            def step(rows: Tensor = query, backend: str = "cpu") -> Tensor:
                scale = HEADS.dim**-0.5
                by_row = rows[:, :, :, None]
                return attend(by_row, place, pages, [], scale, observe, backend=backend).out[
                    ..., 0, :
                ]

            self.steps[name], self.bytes[name] = step, token_bytes(pages)
            self.exact[name] = step(query.float(), "torch")

        for name, specs in FORMATS.items():
            ours(name, tiers(HEADS, specs, key, value))
            ours(name + HUGE, tiers(HEADS, specs, key, value, huge=True))
        form = HEADS.format("k8v4")
        pages = [stored(form, key, value)]
        for name, observe in WATCHED.items():
            ours(name, pages, observe)
        ours("k8v4_page_16", [stored(form, key, value, 16 * form.nbytes)])

    def error(self, name: str) -> float:
        """How far a step is from float32 over what it reads, relative to the largest output."""
        exact = self.exact[name]
        return float((self.steps[name]().float() - exact).abs().max() / exact.abs().max())


def measured(
    sequences: int, tokens: int, threads: tuple[int, ...], rounds: int
) -> list[dict[str, object]]:
    """Time all variants over one size, once for each number of threads."""
    variants = Variants(sequences, tokens)
    errors = {name: variants.error(name) for name in variants.steps}
    if (worst := max(errors.values())) > 0.2:  # fp8 is judged by what it was given
        raise RuntimeError(f"a variant is off by {worst:.2f} of the largest output: {errors}")
    long = torch.ones(READ_BYTES // 4)
    work = {**variants.steps, "read": long.sum}
    variants.bytes["read"] = READ_BYTES
    rows: list[dict[str, object]] = []
    for count in threads:
        torch.set_num_threads(count)
        turns = timed(work, rounds, clock=time.perf_counter)
        size = {"sequences": sequences, "tokens": tokens, "threads": count, "isa": chosen()}
        size["amx"] = "amx" in runnable()
        rows += [
            size | row(turns, name, variants.bytes[name]) | {"error": errors.get(name, 0.0)}
            for name in work
        ]
    return rows


def row(turns: Turns, name: str, read: int) -> dict[str, object]:
    """What one variant came to."""
    low, ratio, high = turns.quartiles(("vllm_bf16",), (name,))
    seconds = turns.median(name)
    share = turns.ratio(("read",), (name,)) * read / READ_BYTES
    return {
        "variant": name,
        "seconds": seconds,
        "bytes": read,
        "gb_per_s": read / seconds / 1e9,
        "vs_vllm_bf16": ratio,
        "vs_vllm_bf16_quartiles": [low, high],
        "share_of_bandwidth": share,
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=int, default=15, help="turns that every variant takes")
    parser.add_argument("--most", type=int, help="leave out sizes of more tokens in all")
    arguments = parser.parse_args()
    has_amx = "amx" in runnable()
    most = arguments.most or max(math.prod(size) for size in SIZES)
    sizes = [size for size in SIZES if math.prod(size) <= most]
    threads: tuple[int, ...] = (1, 2)
    rounds = arguments.rounds
    if arguments.quick:
        sizes, rounds = [(4, 16384)], 5
    rows: list[dict[str, object]] = []
    for sequences, tokens in sizes:
        for found in measured(sequences, tokens, threads, rounds):
            rows.append(found)
            CONSOLE.print(
                f"B={sequences} L={tokens} {found['threads']} threads {found['variant']:14} "
                f"{found['seconds']:.5f} s  x{found['vs_vllm_bf16']:.2f}  "
                f"{found['share_of_bandwidth']:.2f} of bandwidth"
            )
    at = {
        str(r["variant"]): r
        for r in rows
        if (r["sequences"], r["tokens"], r["threads"]) == (4, 16384, 2)
    }

    def of(name: str, figure: str) -> float:
        return float(str(at[name][figure]))

    summary = {
        "k8v4_vs_vllm_bf16": of("k8v4", "vs_vllm_bf16"),
        "k4v2_vs_vllm_bf16": of("k4v2", "vs_vllm_bf16"),
        "mix_20_80_vs_vllm_bf16": of("mix_20_80", "vs_vllm_bf16"),
        "raw_vs_vllm_bf16": of("raw", "vs_vllm_bf16"),
        **{f"{name}{HUGE}_vs_vllm_bf16": of(name + HUGE, "vs_vllm_bf16") for name in FORMATS},
        "k8v4_page_16_over_k8v4": of("k8v4_page_16", "vs_vllm_bf16") / of("k8v4", "vs_vllm_bf16"),
        "k8v4_vs_sdpa": of("k8v4", "vs_vllm_bf16") / of("sdpa_bf16", "vs_vllm_bf16"),
        "k8v4_share_of_bandwidth": of("k8v4", "share_of_bandwidth"),
        "vllm_share_of_bandwidth": of("vllm_bf16", "share_of_bandwidth"),
        **{
            f"observe_{name.removeprefix('k8v4_')}_over_k8v4": of("k8v4", "vs_vllm_bf16")
            / of(name, "vs_vllm_bf16")
            for name in WATCHED
        },
    }
    for name, value in summary.items():
        print(f"{name:28} {value:.4f}")
    name = "cpu_decode_amx" if has_amx else "cpu_decode"
    _result.write(name, summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
