"""What ZACK costs and saves in time: decoding, projections, calibration; and that it is exact.

Decoding is attention of one new token over raw pages of one layer whose heads keep fewer
dimensions, over the same at full dimensions. Ranks are uniform, or those of a real layer whose
heads differ, so that each is attended to by itself. Projections are those of SmolLM2's layers
and of a layer of Llama-3.1-8B's sizes. Seconds are processor time of one thread; both sides of a
ratio run in this process, turn by turn, and it is the median over the turns. Beside every ratio of
times stands the ratio of bytes.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import _result
import torch
from _native import expect_native
from _zack_calibration import MODELS, measured, on_paper
from _zack_decode import SHAPES, Case, Ranks, decode_rows
from _zack_projections import large_layer, projection_rows
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache

from kv_eval.tasks import default_text
from kv_policy import KVPolicy, parse
from kv_svd import Zack
from kv_transformers import CompressedCache, Fold, passing
from kv_transformers.models import LoadedModel, load_model

CONSOLE = Console(stderr=True)
Row = dict[str, object]
RATES = (0.25, 0.5)
SMALL, LARGE = SHAPES


def zack(file: Path, rate: float, multiple: int = 16) -> Zack:
    """The policy with adaptive ranks."""
    policy = parse(f"zack:file={file},rate={rate},multiple={multiple}")
    assert isinstance(policy, Zack)
    return policy


def uniform(name: str, rate: float) -> Case:
    """A layer whose heads all keep the same."""
    shape = SHAPES[name]
    kept = (round(shape.key_dim * (1 - rate)),) * shape.kv_heads
    return Case("uniform", rate, kept, kept)


def adaptive(file: Path, rate: float) -> Case:
    """The layer of SmolLM2 with the most kinds of heads; of several that nearest to the rate.

    With ranks of a multiple of 16 nearly all heads of 64 dimensions keep the same at these rates,
    so it is 8 here.
    """
    ranks = _ranks(file, rate, multiple=8)
    wide = len(ranks[0]) * 2 * SHAPES[SMALL].key_dim

    def kinds(layer: int) -> tuple[int, float]:
        kept = sum(map(sum, ranks[layer])) / wide
        return len(set(ranks[layer])), -abs(kept - (1 - rate))

    layer = max(range(len(ranks)), key=kinds)
    key, value = zip(*ranks[layer], strict=True)
    return Case("adaptive", rate, key, value, layer)


def kinds_of_heads(file: Path) -> Iterator[Row]:
    """Count the layers by their kinds of heads, each of which is attended to by itself."""
    for multiple in (16, 8):
        for rate in RATES:
            kinds = [len(set(heads)) for heads in _ranks(file, rate, multiple)]
            yield {
                "kind": "kinds of heads",
                "model": SMALL,
                "rate": rate,
                "multiple": multiple,
                "layers_with": {str(n): kinds.count(n) for n in sorted(set(kinds))},
            }


def _ranks(file: Path, rate: float, multiple: int) -> list[list[tuple[int, int]]]:
    """Dimensions of keys and values, by layer and head."""
    allotment = zack(file, rate, multiple).allotment
    both = torch.stack((allotment.key, allotment.value), dim=-1).tolist()
    return [[(key, value) for key, value in heads] for heads in both]


def decode(file: Path, quick: bool) -> Iterator[Row]:
    """Time decoding at several ranks, batches and contexts; 64 tokens show what does not grow."""
    sizes = [(1, 64), (1, 4096), (1, 16384), (4, 4096), (4, 16384)]
    for name in SHAPES:
        cases = [uniform(name, rate) for rate in RATES]
        if name == SMALL:
            cases += [adaptive(file, rate) for rate in RATES]
        for batch, tokens in [(1, 64), (2, 300)] if quick else sizes:
            numbers = batch * tokens * SHAPES[name].kv_heads * SHAPES[name].key_dim
            rounds = 3 if quick else max(15, min(101, 2**27 // numbers))
            yield from decode_rows(name, cases, batch, tokens, rounds)


def projections(loaded: LoadedModel, file: Path, quick: bool) -> Iterator[Row]:
    """Time the projections of both models at several rates, for one token and for many."""
    large = large_layer()
    small = {("adaptive", rate): zack(file, rate) for rate in RATES}
    alike: dict[tuple[str, float], KVPolicy] = {}
    for rate in RATES:
        case = uniform(LARGE, rate)
        alike["uniform", rate] = Ranks.of(case.key, case.value)
    for tokens, rounds in ((1, 31), (512, 11)):
        rounds = 2 if quick else rounds
        yield from projection_rows(SMALL, loaded.model, dict(small), tokens, rounds)
        yield from projection_rows(LARGE, large, alike, tokens, rounds)


@torch.inference_mode()
def logits(loaded: LoadedModel, ids: Tensor, prompt: int, spec: str | None) -> Tensor:
    """Read a prompt, then the other tokens one by one; the logits of all of them."""
    model = loaded.model
    cache = DynamicCache(config=model.config) if spec is None else CompressedCache(model, spec)
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    found = [model(input_ids=x, **passing(model, cache), use_cache=True).logits for x in parts]
    return torch.cat(found, dim=1).double()


def full_rank(file: Path, prompt: int, steps: int) -> Iterator[Row]:
    """Compare the logits at full rank with those of the full cache, in float32 and bfloat16."""
    spec, exact = str(zack(file, 0.0)), None
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(dtype=dtype)
        ids = torch.tensor([loaded.tokenizer.encode(default_text().body[: 20 * prompt])])
        ids = ids[:, : prompt + steps]
        full = logits(loaded, ids, prompt, None)
        exact = full if exact is None else exact
        found = {"raw pages": logits(loaded, ids, prompt, "raw")}
        found["unfolded"] = logits(loaded, ids, prompt, spec)
        with Fold(loaded.model, spec):
            found["folded"] = logits(loaded, ids, prompt, spec)
        if dtype != "float32":
            found["full cache, beside float32"] = exact
        for cache, each in found.items():
            yield {
                "kind": "full rank",
                "dtype": dtype,
                "cache": cache,
                "prompt": prompt,
                "steps": steps,
                "largest_logit": float(full.abs().max()),
                "largest_difference": float((each - full).abs().max()),
                "error": float((each - full).abs().max() / full.abs().max()),
                "same_choice": float((each.argmax(-1) == full.argmax(-1)).double().mean()),
            }


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote; of decoding those at the greatest context."""

    def of(figure: str, **wanted: object) -> float:
        found = [row for row in rows if wanted.items() <= row.items()]
        return float(str(found[-1][figure]))

    longest = max(int(str(row["tokens"])) for row in rows if row["kind"] == "decode")
    batch = min(int(str(r["batch"])) for r in rows if r.get("tokens") == longest and "batch" in r)
    at = {"kind": "decode", "rate": 0.5, "tokens": longest, "batch": batch}
    large = {**at, "model": LARGE}
    small = {**at, "model": SMALL, "ranks": "adaptive"}
    one = {"kind": "projections", "rate": 0.5, "tokens": 1}
    exact = {"kind": "full rank", "cache": "folded"}
    return {
        "decode_ratio": of("decode_ratio", **large),
        "decode_ratio_with_maps": of("decode_ratio_with_maps", **large),
        "decode_memory_ratio": of("memory_ratio", **large),
        "decode_ratio_adaptive": of("decode_ratio", **small),
        "decode_ratio_adaptive_with_maps": of("decode_ratio_with_maps", **small),
        "decode_memory_ratio_adaptive": of("memory_ratio", **small),
        "projection_ratio": of("projection_ratio", **one, model=LARGE),
        "projection_memory_ratio": of("memory_ratio", **one, model=LARGE),
        "rotation_over_query_key": of("rotation_over_query_key", **one, model=LARGE),
        "projection_ratio_smollm2": of("projection_ratio", **one, model=SMALL),
        "projection_memory_ratio_smollm2": of("memory_ratio", **one, model=SMALL),
        "rotation_over_query_key_smollm2": of("rotation_over_query_key", **one, model=SMALL),
        "full_rank_logit_error": of("error", **exact, dtype="float32"),
        "full_rank_logit_error_millionths": of("error", **exact, dtype="float32") * 1e6,
        "full_rank_logit_error_bfloat16": of("error", **exact, dtype="bfloat16"),
        "calibration_cpu_seconds": of("cpu_seconds", kind="calibration"),
        "calibration_peak_over_one_window": of("peak_over_one_window", kind="calibration"),
        "calibration_flops_over_forward_8b": of(
            "flops_over_forward", kind="calibration on paper", model=LARGE
        ),
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    expect_native()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        CONSOLE.print(row)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "zack.safetensors"
        add(measured(file, 4096 if quick else 16384))
        for row in kinds_of_heads(file):
            add(row)
        for row in decode(file, quick):
            add(row)
        loaded = load_model(progress=CONSOLE.print)
        for row in projections(loaded, file, quick):
            add(row)
        for row in full_rank(file, *((64, 2) if quick else (512, 8))):
            add(row)
    for sizes in MODELS:
        add(on_paper(sizes))
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:34} {value:.4f}")
    _result.write("zack_speed", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
