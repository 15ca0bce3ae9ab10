# environment: vllm
"""Decode attention that reads some pages: the selection of pages and attention over them.

One layer of 32 query heads over 8 KV heads of 128 dimensions, queries in bfloat16, tokens in
`k8v4`, pages in random order. A step of `quest` selects pages by the bounds of their keys, or by
codes of these (`codes`), and attends over those; a step of `full` attends over all. All take turns
in this process, and a ratio is the median over rounds of the seconds of `full` over those of the
other. Bounds and codes are of all full pages, as between two steps of which neither fills a page.
Bytes are those of tokens read, and of bounds or codes.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product, starmap

import _result
import torch
from _cpu_tokens import Heads, random_vectors, stored, token_bytes
from _native import expect_native
from _timing import Turns, timed
from rich.console import Console
from torch import Tensor

from kv_attention import PageBounds, attend, select_pages
from kv_cpu import chosen
from kv_paging import codes_of as coded
from kv_policy import Budget, PagedTokens, PageReading

HEADS = Heads(query=32, kv=8, dim=128)
SHARES = {"quest": (10, 25, 50, 100), "codes": (6.25, 12.5, 25, 50)}  # by bounds, and by codes
PAGES = (16, 32, 64)
SIZES = list(product((1, 4), (4096, 16384, 32768)))
HEADLINE = {"sequences": 4, "tokens": 16384, "threads": 2, "page": 16}
CONSOLE = Console(stderr=True)
Step = Callable[[], Tensor]


def bounds_of(key: Tensor, page: int) -> PageBounds:
    """Bounds of the keys in each page, rounded to nearest."""
    pages = key.unflatten(2, (-1, page)).float()
    both = torch.cat((pages.amax(3), pages.amin(3)), -1).to(torch.bfloat16)
    return PageBounds(both, torch.full(key.shape[:2], both.shape[2]))


def codes_of(key: Tensor, page: int) -> PageBounds:
    """Codes of the keys in each page."""
    pages = key.unflatten(2, (-1, page))
    lead = pages.shape[:3]
    held = torch.ones(lead.numel(), page, dtype=torch.bool)
    codes = coded(pages.flatten(0, 2), held)
    return PageBounds(codes.view(*lead, -1), torch.full(lead[:2], lead[2]))


def reading_of(share: float) -> PageReading:
    """What `quest` reads by default, in every layer."""
    return PageReading(Budget(share, "percent"), first=4, last=16)


class Variants:
    """A step that reads everything and steps that read less, by name, and what each reads.

    Steps are named by what ranks pages, and by the share that is read, in whole percents.
    """

    def __init__(self, sequences: int, tokens: int, page: int) -> None:
        """Store the tokens of a layer, and the bounds and codes of their pages."""
        key, value = random_vectors(HEADS, sequences, tokens)
        form = HEADS.format("k8v4")
        self.pages = stored(form, key, value, page * form.nbytes)
        self.ranks = {"quest": bounds_of(key, page), "codes": codes_of(key, page)}
        lead = (sequences, HEADS.kv, HEADS.group, HEADS.dim)
        self.query = torch.randn(lead).to(torch.bfloat16)
        self.place = torch.full((sequences, 1), tokens)
        self.steps: dict[str, Step] = {"full": lambda: self.attended(self.pages)}
        self.bytes = {"full": token_bytes([self.pages])}
        for by, share in every():
            read = token_bytes([self.some(by, share)])
            seen = 0 if share == 100 else self.seen(by)
            self.steps[name_of(by, share)] = partial(self.step, by, share)
            self.bytes[name_of(by, share)] = read + seen
        for by in SHARES:
            self.steps[f"select_{by}_25"] = lambda by=by: self.some(by, 25).table
            self.bytes[f"select_{by}_25"] = self.seen(by)

    def seen(self, by: str) -> int:
        """Count the bytes that rank pages."""
        return self.ranks[by].both.numel() * self.ranks[by].both.itemsize

    def some(self, by: str, share: float, backend: str = "cpu") -> PagedTokens:
        """Select the pages of a step."""
        return select_pages(self.query, self.pages, self.ranks[by], reading_of(share), backend)

    def step(self, by: str, share: float) -> Tensor:
        """Select pages, and attend over them."""
        return self.attended(self.some(by, share))

    def attended(self, pages: PagedTokens, backend: str = "cpu", wide: bool = False) -> Tensor:
        """Attend over pages."""
        query = self.query[:, :, :, None]
        query = query.float() if wide else query
        return attend(query, self.place, [pages], [], HEADS.dim**-0.5, backend=backend).out

    def error(self, by: str, share: float) -> float:
        """How far a step is from float32 over the same pages, relative to the largest output."""
        exact = self.attended(self.some(by, share), "torch", wide=True)
        found = self.step(by, share).float()
        return float((found - exact).abs().max() / exact.abs().max())


def every() -> list[tuple[str, float]]:
    """What ranks pages, and the share that is read, of each step that reads less."""
    return [(by, share) for by, shares in SHARES.items() for share in shares]


def name_of(by: str, share: float) -> str:
    """Name a step that reads less."""
    return f"{by}_{int(share)}"


def measured(
    sequences: int, tokens: int, page: int, threads: tuple[int, ...], rounds: int
) -> list[dict[str, object]]:
    """Time all variants over one size, once for each number of threads."""
    variants = Variants(sequences, tokens, page)
    if (worst := max(variants.error(by, share) for by, share in every())) > 0.05:
        raise RuntimeError(f"a step is off by {worst:.3f} of the largest output")
    rows: list[dict[str, object]] = []
    for count in threads:
        torch.set_num_threads(count)
        turns = timed(variants.steps, rounds, clock=time.perf_counter)
        size = {"sequences": sequences, "tokens": tokens, "threads": count, "page": page}
        rows += [
            {**size, "isa": chosen()} | row(turns, name, variants.bytes) for name in variants.steps
        ]
    return rows


def row(turns: Turns, name: str, nbytes: dict[str, int]) -> dict[str, object]:
    """What one variant came to."""
    low, ratio, high = turns.quartiles(("full",), (name,))
    return {
        "variant": name,
        "seconds": turns.median(name),
        "bytes": nbytes[name],
        "bytes_of_full": nbytes[name] / nbytes["full"],
        "over_full": ratio,
        "over_full_quartiles": [low, high],
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=int, default=15, help="turns that every variant takes")
    arguments = parser.parse_args()
    expect_native()
    cases = [(*size, page) for size in SIZES for page in PAGES]
    rounds, threads = arguments.rounds, (1, 2)
    if arguments.quick:
        cases, rounds, threads = [(4, 16384, 16), (4, 16384, 64)], 5, (2,)
    rows: list[dict[str, object]] = []
    for sequences, tokens, page in cases:
        for found in measured(sequences, tokens, page, threads, rounds):
            rows.append(found)
            CONSOLE.print(
                f"B={sequences} L={tokens} page {page} {found['threads']} threads "
                f"{found['variant']:15} {found['seconds']:.5f} s  x{found['over_full']:.2f}  "
                f"{found['bytes_of_full']:.2f} of the bytes"
            )

    def of(variant: str, figure: str, **at: int) -> float:
        wanted = HEADLINE | at | {"variant": variant}
        (found,) = (r for r in rows if all(r[k] == v for k, v in wanted.items()))
        return float(str(found[figure]))

    summary = {
        **{f"{name}_over_k8v4": of(name, "over_full") for name in starmap(name_of, every())},
        "quest_25_over_k8v4_page_64": of("quest_25", "over_full", page=64),
        "codes_12_over_k8v4_page_64": of("codes_12", "over_full", page=64),
        "select_25_of_k8v4": 1 / of("select_quest_25", "over_full"),
        "select_codes_25_of_k8v4": 1 / of("select_codes_25", "over_full"),
        "bounds_of_k8v4_bytes": of("select_quest_25", "bytes_of_full"),
        "codes_of_k8v4_bytes": of("select_codes_25", "bytes_of_full"),
    }
    if not arguments.quick:
        for name in ("quest_25", "codes_12"):
            summary[f"{name}_over_k8v4_1x16k"] = of(name, "over_full", sequences=1)
            summary[f"{name}_over_k8v4_32k"] = of(name, "over_full", tokens=32768)
    for name, value in summary.items():
        print(f"{name:30} {value:.4f}")
    _result.write("quest_speed", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
