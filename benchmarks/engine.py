# environment: vllm
"""What a stock vLLM has beside a policy: speculative decoding and offloading, token for token.

SmolLM2-135M. Rows of kind `drafts` are greedy answers with drafts from the prompt (n-gram) and
without: how many tokens are equal until the first that differs, and how many drafted ones were
accepted. Weights are float32 there, as the products of a matrix with one row and with several round
differently, and bfloat16 is coarse enough for that to change a token; the row of `bf16`, which is
stock vLLM, says what is left. Rows of kind `offload` are answers after prefixes that were evicted
and restored by vLLM's `OffloadingConnector`, compared with those after the same prefixes in memory,
and the tokens that a GiB of the host's memory holds.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from _vllm_load import Load
from _vllm_process import Row, Rows, apart
from _vllm_ways import BF16, arguments, figure, options

from kv_transformers.models import model_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _vllm_engine import Ask
    from vllm import LLM

# 20 answers of 512 tokens are somewhat more than 10,000.
LOAD: Final = Load("drafts", 20, (200, 400), (512, 512))
QUICK: Final = Load("quick", 2, (64, 96), (24, 24))
POLICIES: Final = ("raw", "k8v4", "k4v2", "hadamard+k4v4")
OFFLOADED: Final = "k8v4"  # whose tokens per GiB are a figure
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


FULL: Final = Asked(LOAD, GIB, GIB)
SMALL: Final = Asked(QUICK, 1 << 28, 1 << 28)


@contextmanager
def engine(way: str, asked: Asked, dtype: str, **more: Any) -> "Iterator[LLM]":
    """Run an engine in this process."""
    from vllm import LLM

    made = LLM(
        str(model_folder()),
        dtype=dtype,
        kv_cache_memory_bytes=asked.kv_bytes,
        max_model_len=asked.load.longest,
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
    alone = {"enable_prefix_caching": False}
    with engine(way, asked, "float32", **alone) as made:
        without = answers(made, asks)
    with engine(way, asked, "float32", speculative_config=NGRAM, **alone) as made:
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
    with engine(way, asked, "auto", kv_transfer_config=transfer, block_size=32) as made:
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


def measure(policies: list[str], *, quick: bool, minutes: float | None = None) -> Rows:
    """Ask engines under every policy, and stock ones, for the same answers."""
    asked = SMALL if quick else FULL
    ways = (BF16, *policies)
    rows = Rows("engine", {"ways": ways, "asked": str(asked)}, quick=quick, minutes=minutes)
    for kind, work in (("drafts", drafts), ("offload", offload)):
        for way in ways:
            key: Row = {"kind": kind, "way": figure(way), "policy": way}
            rows.measured(key, partial(apart, work, way, asked))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Shares of identical tokens, the smallest of all policies, and what drafts and bytes give."""
    number = {
        (str(row["kind"]), str(row["way"])): {
            name: float(str(value))
            for name, value in row.items()
            if name not in ("kind", "way", "policy")
        }
        for row in rows
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
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = arguments(__doc__, POLICIES)
    given = parser.parse_args()
    rows = measure(given.policies, quick=given.quick, minutes=given.minutes)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
