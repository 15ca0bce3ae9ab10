"""vLLM's GPU model runner with our Triton kernels, both in Triton's interpreter, on a CPU.

Engines follow each other in one process, in which vLLM is imported and kernels are read once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

import gpu_runner
import interpreted
import launches
from kv_serve.vllm.versions import installed, minor
from transformed import by_transformers

COUNT = 3
POLICIES = ("k8v4", "kv-compress:rate=2,floor=8+k8v4")
GRAPHS = "FULL_AND_PIECEWISE"
# The mode where no part of the model is compiled; 0.29 leaves its name.
DECODING = GRAPHS if minor(installed() or "") == (0, 29) else "FULL_DECODE_ONLY"
SLOW = ("k8v4", "raw", "snapkv:budget=16,window=4+k8v4", "leankv", "zack:file={},rate=0.4")
PROMPTS = [[3 + (i * 7 + j * j) % 90 for j in range(n)] for i, n in enumerate((33, 21))]
Found = dict[str, dict[str, list[object]]]


@dataclass(frozen=True)
class Asked:
    """An engine under a policy, and what it answers."""

    policy: str
    graphs: str | None = None  # with these, scheduling is asynchronous too
    watch: bool = False
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    options: dict[str, object] = field(default_factory=dict)


def run(folder: Path, model: str, engines: Mapping[str, Asked], *, v2: bool = True) -> Found:
    """Let each engine answer its prompts, in a process of their own."""
    target = folder / "found.json"
    options = {
        "model": model,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 20,
    }
    given = {}
    for name, each in engines.items():
        settings = {"kv_policy": each.policy, "kv_backend": "triton", "kv_poison": True}
        more = {"settings": settings, "count": COUNT, "options": options | each.options}
        given[name] = asdict(each) | more
    asked = {
        "environment": {
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        "v2": v2,
        "engines": given,
        "target": str(target),
        "support": [str(Path(each.__file__).parent) for each in (interpreted, launches)],
    }
    command = [sys.executable, str(Path(gpu_runner.__file__)), json.dumps(asked)]
    done = subprocess.run(
        command,
        env={**os.environ, "MALLOC_PERTURB_": "255"},  # memory that nobody wrote is not 0
        text=True,
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(target.read_text())


def check(
    found: Mapping[str, list[object]],
    model: str,
    asked: Asked,
    module: str = "vllm.v1.worker.gpu.model_runner",
) -> None:
    """Compare the tokens with those of transformers, alone and beside prompts seen before."""
    assert "error" not in found, found["error"]
    assert module in found["runner"]
    assert set(found["backend"]) == {"triton"}
    wanted = by_transformers(model, asked.policy, asked.prompts, COUNT)
    assert found["answers"] == [wanted, wanted], asked.policy


ASKED = {
    "alone": Asked(POLICIES[1]),
    "slots": Asked("k8v4", GRAPHS, watch=True),
    "pages": Asked(POLICIES[1], GRAPHS),
    # All that a chunk attends to is as it was computed.
    "chunk": Asked(
        "k8v4:window=64",
        GRAPHS,
        prompts=PROMPTS[:1],
        options={"max_num_batched_tokens": len(PROMPTS[0]) - 1},
    ),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, weights: str) -> Found:
    return run(tmp_path_factory.mktemp("found"), weights, ASKED)


def test_tokens_are_those_of_transformers(found: Found, weights: str) -> None:
    """Whatever the runner does before the first request, which changes nothing."""
    check(found["alone"], weights, ASKED["alone"])


@pytest.mark.slow
def test_tokens_are_those_of_transformers_with_other_policies(
    tmp_path: Path, weights: str, statistics: str
) -> None:
    asked = {policy: Asked(policy.format(statistics)) for policy in SLOW}
    found = run(tmp_path, weights, asked)
    for policy, each in asked.items():
        check(found[policy], weights, each)


@pytest.mark.slow
def test_tokens_are_those_of_transformers_in_the_other_runner(tmp_path: Path, weights: str) -> None:
    asked = {policy: Asked(policy) for policy in POLICIES}
    found = run(tmp_path, weights, asked, v2=False)
    for policy, each in asked.items():
        check(found[policy], weights, each, "vllm.v1.worker.cpu_model_runner")


def test_decode_steps_over_slots_are_graphs_and_wait_for_nothing(
    found: Found, weights: str
) -> None:
    """With asynchronous scheduling, in which every wait for the device delays the next step.

    Launches of decode steps are captured before the first request, and repeated with the requests'
    tokens and padding. Each step is made again where what a GPU has cannot be read, and copies from
    the host that would wait raise.
    """
    slots = found["slots"]
    check(slots, weights, ASKED["slots"])
    assert (slots["scheduler"], slots["graphs"]) == ("AsyncScheduler", DECODING)
    assert slots["replayed"] == [4] * 2 * (COUNT - 1)  # two requests, and padding
    decoding, prompts = [[1, 1, 0, 0], 0], [[len(each) for each in reversed(PROMPTS)], 0]
    assert slots["steps"] == [prompts, *[decoding] * (COUNT - 1)] * 2  # 0 tensors are copied


def check_pages(found: Mapping[str, list[object]], model: str, asked: Asked) -> None:
    check(found, model, asked)
    assert (found["scheduler"], found["graphs"]) == ("AsyncScheduler", DECODING)
    assert found["replayed"] == [4] * 2 * (COUNT - 1)


def test_decode_steps_over_pages_are_graphs(found: Found, weights: str) -> None:
    """No layer of the model is called in them; requests begin and end between."""
    check_pages(found["pages"], weights, ASKED["pages"])


@pytest.mark.slow
def test_decode_steps_over_pages_of_other_policies_are_graphs(
    tmp_path: Path, weights: str, statistics: str
) -> None:
    policies = ("k8v4:window=8", "streaming:budget=16+k8v4", "zack:file={},rate=0.4")
    asked = {policy: Asked(policy.format(statistics), GRAPHS) for policy in policies}
    found = run(tmp_path, weights, asked)
    for policy, each in asked.items():
        check_pages(found[policy], weights, each)


def test_a_prompt_that_ends_with_a_chunk_of_one_token_is_in_no_graph(
    found: Found, weights: str
) -> None:
    """Which vLLM would launch for it, as for a generated token."""
    check(found["chunk"], weights, ASKED["chunk"])
    assert found["chunk"]["replayed"] == [1] * 2 * (COUNT - 1)


@pytest.mark.slow
def test_policies_that_observe_generated_queries_are_in_no_graph(
    tmp_path: Path, weights: str
) -> None:
    asked = Asked("leankv", GRAPHS)
    found = run(tmp_path, weights, {"leankv": asked})["leankv"]
    check(found, weights, asked)
    assert (found["graphs"], found["replayed"]) == ("NONE", [])
