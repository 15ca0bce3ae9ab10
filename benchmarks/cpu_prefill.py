# environment: vllm
"""Attention of a prompt's chunk on a CPU: native code, torch, and vLLM's own paged kernel.

One layer of SmolLM2-135M, 9 query heads over 3 KV heads of 64 dimensions, and one of an 8B model,
32 over 8 of 128, in bfloat16: a chunk of new tokens, each of which sees those up to it, after
tokens that are stored in pages in random order. `sdpa_bf16` is torch's fused kernel over plain
tokens. A row is the median over rounds in which all variants take turns; a ratio is the median over
rounds of vLLM's seconds over the variant's. Seconds of one thread are its processor time, of two
threads the wall's. On a processor with AMX the result is `cpu_prefill_amx`.
"""

import argparse
import time
from collections.abc import Callable

import _result
import torch
from _cpu_tokens import Heads, random_vectors, stored
from _timing import Work, timed
from _vllm_kernel import prefill as vllm_prefill
from rich.console import Console
from torch import Tensor

from kv_attention import DenseTokens, attend
from kv_cpu import chosen, runnable
from kv_policy import PagedTokens

SMALL = Heads(query=9, kv=3, dim=64)
LARGE = Heads(query=32, kv=8, dim=128)
SIZES = ((2048, 0), (2048, 2048), (512, 2048))  # tokens of the chunk, and stored before it
FORMATS = ("raw", "k8v4", "k4v2")
CONSOLE = Console(stderr=True)
Row = dict[str, object]
Pass = Callable[[], Tensor]


class Variants:
    """All ways to attend with the same chunk, by name; outputs are [Q, query heads, D]."""

    def __init__(self, heads: Heads, chunk: int, before: int) -> None:
        """Store the tokens that come before the chunk in every format."""
        self.heads = heads
        key, value = random_vectors(heads, 1, before + chunk)
        query = torch.randn(1, heads.kv, heads.group, chunk, heads.dim).to(torch.bfloat16)
        seen = torch.ones(chunk, before + chunk, dtype=torch.bool).tril(before)
        self.passes: dict[str, Pass] = {
            "vllm_bf16": vllm_prefill(query, key, value, "auto"),
            "sdpa_bf16": self._sdpa(query, key, value, None if before == 0 else seen),
        }
        place = torch.arange(before, before + chunk)[None]
        fresh = [DenseTokens(key[:, :, before:], value[:, :, before:], place, full=True)]
        exact = self._sdpa(query.float(), key.float(), value.float(), seen)()
        self.exact = dict.fromkeys(self.passes, exact)
        for name in FORMATS if before else ("fresh",):
            form = heads.format(name) if before else None
            pages = [stored(form, key[:, :, :before], value[:, :, :before])] if form else []
            for backend in ("cpu", "torch"):
                ours = self._ours(query, place, pages, fresh, backend)
                self.passes[f"{name}_{backend}"] = ours
                self.exact[f"{name}_{backend}"] = self._ours(
                    query.float(), place, pages, fresh, "torch"
                )()

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Pass:
        # Keys are repeated for each head beforehand: that takes no time of the pass.
        keys, values = (x.repeat_interleave(self.heads.group, dim=1) for x in (key, value))
        heads = query.flatten(1, 2)

        def attended() -> Tensor:
            out = torch.nn.functional.scaled_dot_product_attention(
                heads, keys, values, seen, is_causal=seen is None
            )
            return out[0].transpose(0, 1)

        return attended

    def _ours(
        self,
        query: Tensor,
        place: Tensor,
        pages: list[PagedTokens],
        fresh: list[DenseTokens],
        backend: str,
    ) -> Pass:
        fresh = [
            DenseTokens(x.key.to(query.dtype), x.value.to(query.dtype), x.position, x.full)
            for x in fresh
        ]

        def attended() -> Tensor:
            out = attend(query, place, pages, fresh, self.heads.dim**-0.5, backend=backend).out
            return out[0].flatten(0, 1).transpose(0, 1)

        return attended

    def error(self, name: str) -> float:
        """How far a pass is from float32 over what it reads, relative to the largest output."""
        exact = self.exact[name]
        return float((self.passes[name]().float() - exact).abs().max() / exact.abs().max())


def rows(heads: Heads, chunk: int, before: int, threads: int, rounds: int) -> list[Row]:
    """Time all variants over one size."""
    torch.set_num_threads(threads)
    variants = Variants(heads, chunk, before)
    errors = {name: variants.error(name) for name in variants.passes}
    if (worst := max(errors.values())) > 0.05:
        raise RuntimeError(f"a variant is off by {worst:.2f} of the largest output: {errors}")
    work: dict[str, Work] = dict(variants.passes)
    clock = time.thread_time if threads == 1 else time.perf_counter
    turns = timed(work, rounds, clock=clock)
    found: list[Row] = []
    for name in work:
        low, ratio, high = turns.quartiles(("vllm_bf16",), (name,))
        found.append(
            {
                "heads": heads.query,
                "kv_heads": heads.kv,
                "dim": heads.dim,
                "chunk": chunk,
                "before": before,
                "threads": threads,
                "isa": chosen(),
                "variant": name,
                "seconds": turns.median(name),
                "vs_vllm_bf16": ratio,
                "vs_vllm_bf16_quartiles": [low, high],
                "error": errors[name],
            }
        )
        CONSOLE.print(
            f"{heads.query}/{heads.kv} of {heads.dim}, {chunk} after {before}, {threads} threads, "
            f"{name:10} {turns.median(name):.5f} s  "
            f"x{ratio:.2f}  off {errors[name]:.4f}"
        )
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=int, default=15, help="turns that every variant takes")
    arguments = parser.parse_args()
    found: list[Row] = []
    for threads in (1,) if arguments.quick else (1, 2):
        for heads in (SMALL, LARGE):
            for chunk, before in SIZES:
                rounds = 3 if arguments.quick else arguments.rounds
                found += rows(heads, chunk, before, threads, rounds)
    summary = {
        f"{r['variant']}_{r['chunk']}_after_{r['before']}": float(str(r["vs_vllm_bf16"]))
        for r in found
        if r["threads"] == 1
        and r["heads"] == SMALL.query
        and r["variant"] in ("fresh_cpu", "k8v4_cpu", "raw_cpu", "k8v4_torch")
    }
    for name, value in summary.items():
        print(f"{name:30} {value:.4f}")
    name = "cpu_prefill_amx" if "amx" in runnable() else "cpu_prefill"
    _result.write(name, summary, found, quick=arguments.quick)


if __name__ == "__main__":
    main()
