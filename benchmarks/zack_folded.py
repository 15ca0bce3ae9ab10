# environment: vllm
"""A folded checkpoint beside the model it is made from: its logits, and decode steps under `zack`.

SmolLM2-135M. The basis is of docstrings of Python's standard library, the prompts are of Python's
help topics. Logits are of all tokens of a prompt without a compressed cache, in transformers and in
stock vLLM; the error of a token is the norm of the difference over that of the model's logits, each
without its mean, to which softmax is invariant. Both checkpoints are in bfloat16, so that weights
which are rotated are rounded again; `float32` computes with these weights in float32. Steps are of
one token after a prompt: in transformers processor time of one thread, turn by turn in one process;
in vLLM eager engines with two threads, in processes of their own that take turns. Ratios of steps
are medians of the ratios of a round in transformers, and ratios of medians in vLLM.
"""

import argparse
import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Final

import _result
import torch
from _native import expect_native
from _timing import timed
from _vllm_engine import Room, started, steps
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import CONSOLE, Row, alternating, apart
from _vllm_turns import Engine
from _vllm_ways import BF16
from _zack import docstrings, statistics
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from vllm import SamplingParams

from kv_policy import parse
from kv_transformers import CompressedCache, passing
from kv_transformers.checkpoint import write_folded
from kv_transformers.models import load_model, model_folder

UNIFORM: Final = "zack:file={},keep=75%,ranks=uniform"
ADAPTIVE: Final = "zack:file={},keep=75%,multiple=8"
KINDS: Final = {"uniform": UNIFORM, "adaptive": ADAPTIVE}
MODEL, FOLDED = "model", "folded"
TURN: Final = 10  # steps of a turn of an engine
UNSEEN: Final = 2  # of these before the first that counts


def basis(file: Path, tokens: int) -> None:
    """Write the statistics of a text."""
    loaded = load_model(progress=CONSOLE.print)
    for read in statistics(loaded, docstrings(), tokens, file):
        CONSOLE.print(f"{read} tokens read")


def loaded(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a checkpoint onto the CPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, trust_remote_code=False
    )
    return model.eval()


@torch.inference_mode()
def by_transformers(folder: Path, dtype: torch.dtype, prompts: Sequence[list[int]]) -> Tensor:
    """The logits of all tokens of prompts but the last, which vLLM gives apart."""
    model = loaded(folder, dtype)
    found = [model(torch.tensor([ids])).logits[0, :-1] for ids in prompts]
    return torch.cat(found).float()


def by_vllm(folder: Path, prompts: Sequence[list[int]]) -> Tensor:
    """The same in stock vLLM, whose logits of a whole prompt are those of its log probabilities."""
    longest = max(map(len, prompts))
    room = Room(4 * longest * raw_token_bytes(), longest + 8, longest + 8, 1, model=str(folder))
    found: list[Tensor] = []
    with started(BF16, room) as (engine, _):
        model = engine.model_executor.driver_worker.worker.model_runner.model
        compute = model.compute_logits

        def keep(hidden: Tensor) -> Tensor:
            out: Tensor = compute(hidden)
            found.append(out.float().clone())
            return out

        model.compute_logits = keep
        whole = []
        for i, ids in enumerate(prompts):
            found.clear()
            settings = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            engine.add_request(str(i), {"prompt_token_ids": ids}, settings)
            for _ in steps(engine):
                pass
            whole.append(max(found, key=len))
    return torch.cat(whole)


def compared(want: Tensor, found: Tensor) -> Row:
    """The errors of each token's logits, and how often the likeliest token is the same."""
    want, found = (x - x.mean(-1, keepdim=True) for x in (want.double(), found.double()))
    error = (found - want).norm(dim=-1) / want.norm(dim=-1)
    same = want.argmax(-1) == found.argmax(-1)
    return {
        "tokens": len(want),
        "mean_error": float(error.mean()),
        "largest_error": float(error.max()),
        "same_choice": float(same.double().mean()),
    }


def logits(out: Path, length: int, count: int) -> list[Row]:
    """Compare logits of both checkpoints in transformers and vLLM."""
    ids = text_ids()
    prompts = [ids[i * length : (i + 1) * length] for i in range(count)]
    folders = model_folder(), out
    hosts: dict[tuple[str, str], Callable[[Path], Tensor]] = {
        ("transformers", "float32"): lambda x: by_transformers(x, torch.float32, prompts),
        ("transformers", "bfloat16"): lambda x: by_transformers(x, torch.bfloat16, prompts),
        ("vllm", "bfloat16"): lambda x: apart(by_vllm, x, prompts),
    }
    rows: list[Row] = []
    exact: Tensor | None = None
    for (host, dtype), run in hosts.items():
        want, found = map(run, folders)
        rows.append({"kind": "logits", "host": host, "dtype": dtype, **compared(want, found)})
        CONSOLE.print(rows[-1])
        exact = want if exact is None else exact
        if dtype != "float32":  # what rounding in this dtype changes without any fold
            row = compared(exact, want)
            rows.append({"kind": "logits of the model", "host": host, "dtype": dtype, **row})
            CONSOLE.print(rows[-1])
        gc.collect()
    return rows


@torch.inference_mode()
def stepper(model: PreTrainedModel, policy: str | None, ids: list[int]) -> Callable[[], object]:
    """Read a prompt, and give what decodes one token more."""
    cache = DynamicCache(config=model.config) if policy is None else CompressedCache(model, policy)
    model(torch.tensor([ids]), **passing(model, cache), logits_to_keep=1)
    one = torch.tensor([[ids[0]]])

    @torch.inference_mode()
    def step() -> object:
        return model(one, **passing(model, cache))

    return step


def in_transformers(out: Path, policies: Mapping[str, str], length: int, rounds: int) -> list[Row]:
    """Time decode steps of all caches turn by turn, over those of `raw`."""
    ids = text_ids()[:length]
    models = {MODEL: loaded(model_folder(), torch.bfloat16), FOLDED: loaded(out, torch.bfloat16)}
    works = {("raw", MODEL): stepper(models[MODEL], "raw", ids)}
    for ranks, policy in policies.items():
        for name, model in models.items():
            works[ranks, name] = stepper(model, policy, ids)
    found = timed({" ".join(key): work for key, work in works.items()}, rounds)
    rows: list[Row] = []
    for ranks, name in works:
        own, raw = f"{ranks} {name}", f"raw {MODEL}"
        rows.append(
            {
                "kind": "steps",
                "host": "transformers",
                "ranks": ranks,
                "checkpoint": name,
                "batch": 1,
                "tokens": length,
                "ms": 1000 * found.median(own),
                "over_raw": found.ratio((own,), (raw,)),
                "quartiles": found.quartiles((own,), (raw,)),
            }
        )
        CONSOLE.print(rows[-1])
    return rows


def in_vllm(
    out: Path, policies: Mapping[str, str], length: int, rounds: int, batches: Sequence[int]
) -> list[Row]:
    """Time decode steps of all engines in turns, over those of `raw`."""
    ids = text_ids()
    longest = length + (rounds * TURN + 8) * 1 + max(batches)
    room = Room(
        (max(batches) + 2) * (longest + 64) * raw_token_bytes(), longest, length + 48, max(batches)
    )
    ways = {("raw", MODEL): ("raw", model_folder())}
    for ranks, policy in policies.items():
        ways |= {(ranks, MODEL): (policy, model_folder()), (ranks, FOLDED): (policy, out)}
    rows: list[Row] = []
    with ExitStack() as held:
        engines = {
            key: Engine.start(way, replace(room, model=str(folder)), 2, held)
            for key, (way, folder) in ways.items()
        }
        for batch in batches:
            prompts = [ids[997 * i : 997 * i + length] for i in range(batch)]
            for engine in engines.values():
                engine.open(prompts)
            names = {" ".join(key): key for key in ways}
            took: dict[tuple[str, str], list[list[float]]] = {key: [] for key in ways}
            for _, name in alternating([*names], rounds):
                took[names[name]].append(engines[names[name]].steps(TURN)[UNSEEN:])
            for engine in engines.values():
                engine.close(batch)
            raw = median(chain(*took["raw", MODEL]))
            for (ranks, name), seconds in took.items():
                own = median(chain(*seconds))
                row = {"host": "vllm", "ranks": ranks, "checkpoint": name, "batch": batch}
                figures = {"tokens": length, "ms": 1000 * own, "over_raw": own / raw}
                rows.append({"kind": "steps", **row, **figures})
                CONSOLE.print(rows[-1])
    return rows


def summarize(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that a document may quote."""
    found = {}
    for row in rows:
        if row["kind"] == "logits":
            end = f"{row['host']}_{row['dtype']}"
            for name in ("mean_error", "largest_error", "same_choice"):
                found[f"{name}_{end}"] = float(str(row[name]))
        elif row["kind"] == "steps" and row["ranks"] != "raw":
            end = f"{row['host']}_{row['ranks']}_{row['checkpoint']}"
            batch = "" if row["batch"] == 1 else f"_{row['batch']}"
            found[f"step_over_raw_{end}{batch}"] = float(str(row["over_raw"]))
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    expect_native()
    torch.set_num_threads(1)
    length, rounds = (200, 3) if quick else (2000, 41)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "zack", Path(folder) / "checkpoint"
        basis(file, 4096 if quick else 16384)
        policies = {ranks: str(parse(text.format(file))) for ranks, text in KINDS.items()}
        write_folded(None, parse(policies["uniform"]), out, progress=CONSOLE.print)
        rows += logits(out, *((64, 2) if quick else (512, 8)))
        rows += in_transformers(out, policies, length, rounds)
        gc.collect()
        turns, batches = (2, (1,)) if quick else (10, (1, 8))
        rows += in_vllm(out, policies, length, turns, batches)
    summary = summarize(rows)
    for name, value in summary.items():
        print(f"{name:48} {value:.6f}")
    _result.write("zack_folded", summary, rows, quick=quick)


if __name__ == "__main__":
    main()
