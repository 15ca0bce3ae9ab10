# environment: vllm
"""What a stock vLLM does beside a policy: drafts, offloading, long prompts, and its versions.

SmolLM2-135M. Rows of kind `drafts` are greedy answers with drafts from the prompt (n-gram) and
without: how many tokens are equal until the first that differs, and how many drafted ones were
accepted. Weights are float32 there, as the products of a matrix with one row and with several round
differently, and bfloat16 is coarse enough for that to change a token; the row of `bf16`, which is
stock vLLM, says what is left. Rows of kind `offload` are answers after prefixes that were evicted
and restored by vLLM's `OffloadingConnector`, compared with those after the same prefixes in memory,
and the tokens that a GiB of the host's memory holds. Rows of kind `reading` are prompts that are
compressed while they are read, with the most blocks of vLLM that the request has at a time; their
positions go further than SmolLM2 was trained for, which changes no count. Rows of kind `version`
and `upstream` are read from the reports of `nox -s vllm -- all` and `nox -s upstream -- VERSION`,
which run before; without them their figures are left out. `--reports` reads them again into the
result that is there, and measures nothing.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from _result import RESULTS
from _vllm_engine import Ask
from _vllm_load import Load, raw_token_bytes, text_ids
from _vllm_process import Row, Rows, apart
from _vllm_ways import BF16, arguments, figure, options

from kv_policy.files import write_whole
from kv_transformers.models import model_folder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # only this folder is on the path

from tools.served import compared, ran

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm import LLM

ALONE: Final = {"enable_prefix_caching": False}
# 20 answers of 512 tokens are somewhat more than 10,000.
LOAD: Final = Load("drafts", 20, (200, 400), (512, 512))
QUICK: Final = Load("quick", 2, (64, 96), (24, 24))
POLICIES: Final = ("raw", "k8v4", "k4v2", "hadamard+k4v4")
# Which compress a prompt while it is read.
READING: Final = (
    "streaming:budget={},chunks=true+k8v4",
    "gate:file=smollm2-135m,budget={},recent=64,chunks=true+k8v4",
)
OFFLOADED: Final = "k8v4"  # whose tokens per GiB are a figure
READ: Final = ("version", "upstream")
KINDS: Final = ("reading", "drafts", "offload", *READ)
GIB: Final = 1 << 30
DRAFTS: Final = 4
NGRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """Requests, and the memory of the engine and of the host for them, in bytes."""

    load: Load
    kv_bytes: int
    host_bytes: int

    def options(self) -> dict[str, Any]:
        """Give the options of an engine."""
        return {"kv_cache_memory_bytes": self.kv_bytes, "max_model_len": self.load.longest}


@dataclass(frozen=True, slots=True)
class Long:
    """A prompt that is compressed while it is read; all in tokens."""

    prompt: int
    budget: int
    chunk: int  # that is read in a step
    held: int  # uncompressed, by the memory of the engine
    block: int = 16
    answer: int = 16

    def options(self) -> dict[str, Any]:
        """Give the options of an engine."""
        longest = self.prompt + self.answer
        return {
            "kv_cache_memory_bytes": self.held * raw_token_bytes(),
            "max_model_len": longest,
            "max_num_batched_tokens": self.chunk,
            "block_size": self.block,
            "hf_overrides": {"max_position_embeddings": longest},
        }


FULL: Final = Asked(LOAD, GIB, GIB), Long(32_768, 1024, 2048, 4096)
SMALL: Final = Asked(QUICK, 1 << 28, 1 << 28), Long(1024, 128, 128, 512)


@contextmanager
def engine(way: str, dtype: str, **more: Any) -> "Iterator[LLM]":
    """Run an engine in this process."""
    from vllm import LLM

    made = LLM(
        str(model_folder()),
        dtype=dtype,
        enforce_eager=True,
        disable_log_stats=False,
        **options(way),
        **more,
    )
    try:
        yield made
    finally:
        made.llm_engine.engine_core.shutdown()


def answers(made: "LLM", asks: "Sequence[Ask]") -> list[tuple[list[int], int]]:
    """Return the tokens of each answer, and how many of its prompt were cached."""
    from vllm import SamplingParams

    settings = [
        SamplingParams(temperature=0, max_tokens=each.answer, ignore_eos=True, detokenize=False)
        for each in asks
    ]
    prompts = [{"prompt_token_ids": list(each.prompt)} for each in asks]
    found = made.generate(prompts, settings, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in found]


def equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens of two answers until one differs."""
    same = [a == b for a, b in zip(first, second, strict=True)]
    return (*same, False).index(False)


def drafts(way: str, asked: Asked) -> Row:
    """Compare greedy answers with drafts with those without."""
    asks = asked.load.asks()
    given = {**asked.options(), **ALONE}
    with engine(way, "float32", **given) as made:
        without = answers(made, asks)
    with engine(way, "float32", speculative_config=NGRAM, **given) as made:
        drafted = answers(made, asks)
        told = {each.name: getattr(each, "value", 0) for each in made.get_metrics()}
    both = zip(without, drafted, strict=True)
    return {
        "tokens": sum(len(tokens) for tokens, _ in without),
        "identical": sum(equal(a, b) for (a, _), (b, _) in both),
        "drafted": told["vllm:spec_decode_num_draft_tokens"],
        "accepted": told["vllm:spec_decode_num_accepted_tokens"],
    }


def offload(way: str, asked: Asked) -> Row:
    """Compare answers after restored prefixes with those after prefixes in the engine's memory."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    extra = {"spec_name": "HostSpec", "spec_module_path": "kv_serve.vllm.offload"}
    extra |= {"cpu_bytes_to_use": asked.host_bytes}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    asks = asked.load.asks()
    given = {**asked.options(), "kv_transfer_config": transfer, "block_size": 32}
    with engine(way, "auto", **given) as made:
        block = made.llm_engine.vllm_config.cache_config.block_size
        chunks, blocks, _ = get_kv_transfer_group().connector_worker.worker.held[0].shape
        answers(made, asks)
        answers(made, asked.load.asks(seed=1)[:1])  # blocks are copied in a later step
        cached = answers(made, asks)
        if not made.reset_prefix_cache():
            raise RuntimeError("prefixes cannot be evicted while requests run")
        restored = answers(made, asks)
    both = zip(cached, restored, strict=True)
    return {
        "tokens": sum(len(tokens) for tokens, _ in cached),
        "identical": sum(equal(a, b) for (a, _), (b, _) in both),
        "cached": sum(count for _, count in cached),
        "restored": sum(count for _, count in restored),
        "tokens_per_gib": chunks * blocks * block * GIB / asked.host_bytes,
    }


@contextmanager
def watched(made: "LLM") -> "Iterator[list[int]]":
    """Note how many blocks are in use whenever some are taken."""
    pool = made.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    take, found = pool.get_new_blocks, []

    def taking(count: int) -> object:
        given = take(count)
        found.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return given

    with patch.object(pool, "get_new_blocks", taking):
        yield found


def reading(way: str, long: Long) -> Row:
    """Read a prompt in chunks, and count the most blocks that the request has."""
    ask = Ask(tuple(islice(cycle(text_ids()), long.prompt)), long.answer)
    with engine(way, "auto", **long.options(), **ALONE) as made, watched(made) as used:
        ((tokens, _),) = answers(made, [ask])
    if len(tokens) != long.answer:
        raise RuntimeError(f"the answer has {len(tokens)} of {long.answer} tokens")
    return {
        "tokens": long.prompt,
        "budget": long.budget,
        "chunk": long.chunk,
        "block_tokens": long.block,
        "held": long.held,
        "blocks": max(used),
    }


def measure(policies: list[str], *, quick: bool, minutes: float | None = None) -> Rows:
    """Ask engines under every policy, and stock ones, for the same answers."""
    asked, long = SMALL if quick else FULL
    ways = (BF16, *policies)
    read = tuple(each.format(long.budget) for each in READING)
    given = {"ways": ways, "read": read, "asked": str(asked), "long": str(long)}
    rows = Rows("engine", given, quick=quick, minutes=minutes)
    for way in read:
        key: Row = {"kind": "reading", "way": figure(way), "policy": way}
        rows.measured(key, partial(apart, reading, way, long))
    for kind, work in (("drafts", drafts), ("offload", offload)):
        for way in ways:
            key = {"kind": kind, "way": figure(way), "policy": way}
            rows.measured(key, partial(apart, work, way, asked))
    return rows


def versions() -> list[Row]:
    """Give the versions of vLLM that were tested, and compared, with what that found."""
    found: list[Row] = []
    for kind, rows, command in (
        ("version", ran(), "nox -s vllm -- all"),
        ("upstream", compared(), "nox -s upstream -- 0.33.0"),
    ):
        found += [{"kind": kind, **row} for row in rows]
        if not rows:
            print(f"no report of `{command}` is here, so its figure is left out", file=sys.stderr)
    return found


def figures(rows: "Sequence[Mapping[str, Any]]") -> dict[str, float]:
    """Shares of identical tokens, the smallest of all policies, and what drafts and bytes give.

    A prompt's pages are over those of its budget and a chunk, and over those of its budget alone,
    the largest of all policies.
    """
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    number = {
        (str(row["kind"]), str(row["way"])): {
            name: float(str(value))
            for name, value in row.items()
            if name not in ("kind", "way", "policy")
        }
        for row in (*of["drafts"], *of["offload"])
    }
    found: dict[str, float] = {}
    for kind, name in (("drafts", "spec_identical_tokens"), ("offload", "offload_identical")):
        each = {w: x["identical"] / x["tokens"] for (k, w), x in number.items() if k == kind}
        found[f"{name}_stock"] = each.pop(BF16)
        found[name] = min(each.values())
    rate = {
        way: x["accepted"] / max(1.0, x["drafted"])
        for (kind, way), x in number.items()
        if kind == "drafts"
    }
    stock = rate.pop(BF16)
    found["spec_acceptance_stock"] = stock
    found["spec_acceptance_gap"] = max(abs(each - stock) for each in rate.values())
    back = [x["restored"] / x["cached"] for (k, _), x in number.items() if k == "offload"]
    found["offload_restored"] = min(back)
    if (key := ("offload", figure(OFFLOADED))) in number:
        less = number["offload", BF16]["tokens_per_gib"]
        found["offload_tokens_per_gib_vs_bf16"] = number[key]["tokens_per_gib"] / less
    for name, beside in (("", ("budget", "chunk")), ("_alone", ("budget",))):
        found[f"peak_pages_32k_over_budget{name}"] = max(
            row["blocks"] * row["block_tokens"] / sum(row[each] for each in beside)
            for row in of["reading"]
        )
    if of["version"]:
        right = [row for row in of["version"] if row["passed"] and not row["failed"]]
        found["vllm_versions"] = len(right)
    if of["upstream"]:
        found["upstream_checked"] = sum(row["differ"] == 0 for row in of["upstream"])
    return found


def renew(path: Path) -> None:
    """Replace the rows of versions of a result, and its figures, by what reports say now."""
    result = json.loads(path.read_text())
    result["rows"] = [row for row in result["rows"] if row["kind"] not in READ] + versions()
    result["summary"] = figures(result["rows"])
    write_whole(path, f"{json.dumps(result, indent=2, allow_nan=False)}\n".encode())


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    parser.add_argument("--reports", action="store_true", help="read the reports of versions alone")
    given = parser.parse_args()
    if given.reports:
        renew(RESULTS / "engine.json")
        return
    rows = measure(given.policies, quick=given.quick, minutes=given.minutes)
    rows.rows += versions()
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
