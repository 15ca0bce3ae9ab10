"""The ways to store keys and values that are compared: vLLM's own, and policies of ours."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import _result
from _arguments import count
from _native import expect_native

from kv_eval.evaluate.specs import split_specs
from kv_policy import parse
from kv_serve.vllm.names import KEY

# Stock vLLM, keys and values in the model's dtype. The policy of that name is meant by `raw`.
BF16: Final = "bf16"
FP8: Final = "fp8"  # stock vLLM, --kv-cache-dtype fp8
DTYPES: Final = {BF16: "auto", FP8: "fp8"}


def options(way: str) -> dict[str, Any]:
    """Arguments of an engine: those of stock vLLM, or a policy.

    Raises:
        RuntimeError: native code does not run here, so that a policy would run in torch.
    """
    if way in DTYPES:
        return {"kv_cache_dtype": DTYPES[way]}
    expect_native()
    return {"additional_config": {KEY: way}}


def figure(way: str) -> str:
    """Give a name for figures: `kv-compress:rate=4+k8v4` is `kv_compress_rate_4_k8v4`.

    The file of a basis is left out, since a path says nothing.

    >>> figure("zack:file=/tmp/basis,rate=0.1+k8v4")
    'zack_rate_0_1_k8v4'
    """
    return re.sub(r"\W+", "_", re.sub(r"\bfile=[^,+]*,?", "", way)).strip("_")


def canonical(way: str) -> str:
    """Give one text for a way to store.

    Raises:
        ValueError: it is neither stock nor a policy.
    """
    return way if way in DTYPES else str(parse(way))


def with_basis(ways: Sequence[str], basis: Path | None) -> tuple[str, ...]:
    """Put a basis in place of `{zack}`, at the rate that kept 99 % of quality.

    The rate is the figure `rate_at_99` of the benchmark `zack_quality`. Without a basis what needs
    one is left out, and said to be.

    Raises:
        ValueError: something is neither stock nor a policy.
    """
    if basis is None:
        left_out = [way for way in ways if "{zack}" in way]
        if left_out:
            print(f"without --basis these are left out: {', '.join(left_out)}", file=sys.stderr)
        return tuple(canonical(way) for way in ways if way not in left_out)
    measured = json.loads((_result.RESULTS / "zack_quality.json").read_text())
    rate = f"{measured['summary']['rate_at_99']:.4f}"
    named = (way.replace("{zack}", f"zack:file={basis},rate={rate}") for way in ways)
    return tuple(canonical(way) for way in named)


def arguments(description: str | None, default: Sequence[str]) -> argparse.ArgumentParser:
    """The options that all benchmarks of engines have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument(
        "--policies", type=split_specs, default=list(default), help="in place of the usual ones"
    )
    parser.add_argument(
        "--minutes", type=count, help="begin nothing after so many; the same command goes on"
    )
    parser.add_argument("--basis", type=Path, help="file of `kv-serve calibrate zack`, for {zack}")
    return parser
