"""What writes pages on a processor: native code beside torch, and beside a copy of memory.

Bulk operations are over 16,384 tokens of 8 heads of 128 dimensions: encoding from bfloat16,
encoding anew what lies in another format, and MoveCache, which closes the gaps where a random half
of the tokens went. Their bytes are those read and those written. A step is one of SmolLM2 over 8
sequences: in each of 720 rows the least score is found in both tiers, one victim goes from K8V4
to K4V2, and a candidate takes its place. Attention is a decode step of 4 queries a head over tokens
of K4V4 with a scale for each channel of 32 keys.

Everything runs on one thread, and seconds are its processor time.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import _result
import torch
from _timing import Turns, timed
from rich.console import Console
from torch import Tensor

from kv_attention import attend
from kv_paging import PagePool, Recoding, Tiers, TokenStore, TokenWrite, fit
from kv_policy import DROP, RawCodec, TokenFormat
from kv_quant import ChannelCodec, IntegerCodec, RowsCodec

CONSOLE = Console(stderr=True)
HEADS, DIM, BLOCK = 8, 128, 32
WAYS = ("cpu", "torch")
FORMATS = {
    "k8v4": TokenFormat(IntegerCodec(DIM, 8), IntegerCodec(DIM, 4)),
    "k4v2": TokenFormat(IntegerCodec(DIM, 4), IntegerCodec(DIM, 2)),
    "raw": TokenFormat(RawCodec(DIM, torch.bfloat16), RawCodec(DIM, torch.bfloat16)),
}


class Full:
    """A store of so many tokens a head, and the vectors that fill it."""

    def __init__(self, name: str, way: str, tokens: int) -> None:
        """Fill it."""
        torch.manual_seed(0)
        (layout,) = fit([FORMATS[name]], 64, scores=True, positions=True)
        self.store = TokenStore(PagePool(layout.nbytes, kernels=way), layout, 1, 1, HEADS)
        self.table_rows, self.start = torch.arange(HEADS), torch.zeros(HEADS, dtype=torch.long)
        key, value = torch.randn(2, HEADS, tokens, DIM).bfloat16()
        place = torch.arange(tokens, dtype=torch.int32).expand(HEADS, tokens).contiguous()
        self.keep = torch.ones(HEADS, tokens, dtype=torch.bool)
        self.tokens = (key, value, torch.rand(HEADS, tokens), place)
        self.half = torch.rand(HEADS, tokens) < 0.5
        self.store.append(self.table_rows, key, value, self.keep, *self.tokens[2:])

    @property
    def bytes_of_token(self) -> float:
        """Those in the page."""
        return self.store.layout.token_bytes

    def encode(self) -> None:
        """Write all tokens once more, where they are."""
        pages = self.store.whole()
        tokens = TokenWrite(self.table_rows, self.start, self.keep, *self.tokens)
        self.store.kernels.write(pages, tokens)

    def encode_from(self, other: "Full") -> None:
        """Write all tokens of another store, encoded anew from its pages."""
        source = other.store.whole()
        tokens = Recoding(source, self.table_rows, self.table_rows, self.start, self.keep)
        self.store.kernels.recode(self.store.whole(), tokens)

    def compact(self) -> None:
        """Close the gaps of a random half; the lengths stay, so that it can be done again."""
        self.store.kernels.compact(self.store.whole(), self.table_rows, self.half)

    @property
    def moved(self) -> int:
        """Tokens that change their place then."""
        inside = torch.arange(self.half.shape[1]) < self.half.sum(1, keepdim=True)
        return int((self.half & ~inside).sum())


class Step:
    """Tiers of SmolLM2's layers and heads for a batch, and a step that can be done again."""

    def __init__(self, way: str, tokens: int, shape: tuple[int, int, int] = (30, 8, 3)) -> None:
        """Fill both tiers."""
        forms = [TokenFormat(IntegerCodec(64, k), IntegerCodec(64, k // 2)) for k in (8, 4)]
        layouts = fit(forms, 16, scores=True, positions=True)
        self.tiers = Tiers(PagePool(layouts[0].nbytes, kernels=way), layouts, *shape)
        torch.manual_seed(0)
        table_rows = self.tiers.table_rows()
        for tier, count in enumerate((tokens // 4, tokens // 2)):
            key, value = torch.randn(2, len(table_rows), count, 64).bfloat16()
            keep = torch.ones(len(table_rows), count, dtype=torch.bool)
            place = torch.arange(count).expand(len(table_rows), count)
            score = torch.rand(len(table_rows), count)
            self.tiers.append(tier, table_rows, key, value, keep, score, place)
        none = torch.zeros(len(table_rows), dtype=torch.uint8)
        self.choice = (none, none, none + 1)
        self.leave = (none + DROP, none + 1, none + DROP)
        vectors = torch.randn(2, len(table_rows), 64).bfloat16()
        self.token = (*vectors, torch.rand(len(table_rows)), torch.zeros(len(table_rows)).int())

    def weakest(self) -> Tensor:
        """Find the victims."""
        return self.tiers.weakest()[1]

    def step(self) -> None:
        """A candidate enters and a victim moves down; in a second step one is dropped there."""
        for choice in (self.choice, self.leave):
            self.tiers.step(*choice, self.weakest(), *self.token)


class Attention:
    """Tokens whose keys have scales per channel, and a decode step over them."""

    def __init__(self, tokens: int) -> None:
        """Fill blocks, and the residual of a few tokens that do not fill one."""
        torch.manual_seed(0)
        value = RowsCodec(IntegerCodec(DIM, 4), BLOCK)
        (layout,) = fit([TokenFormat(ChannelCodec(DIM, 4, BLOCK), value)], 64, positions=True)
        pool = PagePool(layout.nbytes)
        self.tiers = Tiers(pool, [layout], 1, 1, HEADS, raw=FORMATS["raw"])
        key, value = torch.randn(2, HEADS, tokens + 5, DIM).bfloat16()
        keep = torch.ones(HEADS, tokens + 5, dtype=torch.bool)
        place = torch.arange(tokens + 5).expand(HEADS, -1)
        self.tiers.append(0, self.tiers.table_rows(), key, value, keep, None, place)
        self.query = torch.randn(1, HEADS, 4, 1, DIM).bfloat16()
        self.place = torch.full((1, 1), tokens + 5)

    def step(self, backend: str) -> Tensor:
        """Attend."""
        pages = self.tiers.views(0)
        return attend(self.query, self.place, pages, [], DIM**-0.5, backend=backend).out


def measured(tokens: int, rounds: int) -> list[dict[str, object]]:
    """Time everything turn by turn."""
    rows: list[dict[str, object]] = []
    whole = torch.randn(tokens * HEADS * DIM // 2)
    target = torch.empty_like(whole)

    def add(kind: str, name: str, work: dict[str, Callable[[], object]], nbytes: float) -> None:
        turns: Turns = timed({**work, "copy": lambda: target.copy_(whole)}, rounds)
        row: dict[str, object] = {"kind": kind, "name": name, "bytes": nbytes, "rounds": rounds}
        for way in WAYS:
            row[f"{way}_s"] = turns.median(way)
            row[f"{way}_gb_s"] = nbytes / turns.median(way) / 1e9
        row["copy_gb_s"] = 2 * whole.nbytes / turns.median("copy") / 1e9
        row["load"] = os.getloadavg()[0]  # what else the machine did
        row["speedup"] = turns.ratio(("torch",), ("cpu",))
        rows.append(row)
        CONSOLE.print(row)

    full = {(name, way): Full(name, way, tokens) for name, way in product(FORMATS, WAYS)}
    count = tokens * HEADS
    for name in FORMATS:
        work = {way: full[name, way].encode for way in WAYS}
        each = 4 * DIM + 8 + full[name, "cpu"].bytes_of_token
        add("encode", name, dict(work), count * each)
    for before, after in (("k8v4", "k4v2"), ("raw", "k8v4")):
        again = {way: partial(full[after, way].encode_from, full[before, way]) for way in WAYS}
        each = sum(full[name, "cpu"].bytes_of_token for name in (before, after))
        add("requantize", f"{before} to {after}", dict(again), count * each)
    for name in FORMATS:
        one = full[name, "cpu"]
        work = {way: full[name, way].compact for way in WAYS}
        add("movecache", name, dict(work), 2 * one.moved * one.bytes_of_token)
    attention = Attention(tokens)
    each = sum(IntegerCodec(DIM, 4).parts) + sum(ChannelCodec(DIM, 4, BLOCK).parts) / BLOCK
    add("attention", "channel", {way: partial(attention.step, way) for way in WAYS}, count * each)
    steps = {way: Step(way, tokens // 16) for way in WAYS}
    scores = sum(store.length.sum() * 4 for store in steps["cpu"].tiers.stores)
    add("weakest", "720 streams", {way: one.weakest for way, one in steps.items()}, float(scores))
    add("steps", "720 streams", {way: one.step for way, one in steps.items()}, float(2 * scores))
    return rows


def summarized(rows: list[dict[str, object]]) -> dict[str, float]:
    """The figures that a document may quote: bytes a second in bulk, milliseconds of a step."""
    summary = {}
    for row in rows:
        kind, name = str(row["kind"]), f"{row['kind']}_{row['name']}".partition(" ")[0]
        if kind in ("weakest", "steps"):
            name = kind
            summary[f"{kind}_ms"] = 1e3 * float(str(row["cpu_s"]))
        else:
            summary[f"{name}_gb_s"] = float(str(row["cpu_gb_s"]))
        summary[f"{name}_speedup"] = float(str(row["speedup"]))
    summary["copy_gb_s"] = median(float(str(row["copy_gb_s"])) for row in rows)
    return summary


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tokens, rounds = (512, 2) if arguments.quick else (16384, 7)
    with torch.inference_mode():
        rows = measured(tokens, rounds)
    summary = summarized(rows)
    for name, value in summary.items():
        print(f"{name:40} {value:.5g}")
    _result.write("cpu_store", summary, rows, quick=arguments.quick)


if __name__ == "__main__":
    main()
