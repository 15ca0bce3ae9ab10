"""vLLM's GPU model runner with our Triton kernels, both in Triton's interpreter, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runner
import launches
from transformed import by_transformers

COUNT = 5
POLICIES = ("k8v4", "kv-compress:rate=2,floor=8+k8v4")
GRAPHS = {"graphs": "FULL_AND_PIECEWISE", "async": True}
SLOW = ("raw", "snapkv:budget=16,window=4+k8v4", "leankv", "zack:file={},rate=0.4")
PROMPTS = [[3 + (i * 7 + j * j) % 90 for j in range(n)] for i, n in enumerate((33, 21))]
Found = dict[str, dict[str, list[object]]]


def run(
    folder: Path,
    model: str,
    policies: dict[str, str],
    *,
    v2: bool,
    options: dict[str, object] | None = None,
    **more: object,
) -> Found:
    """Let an engine for each policy answer the prompts, in a process of its own."""
    target = folder / "found.json"
    asked = {
        "environment": {
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": str(int(v2)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        },
        "v2": v2,
        "settings": {
            name: {"kv_policy": text, "kv_backend": "triton", "kv_poison": True}
            for name, text in policies.items()
        },
        "options": {
            "model": model,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 1 << 20,
        },
        "prompts": PROMPTS,
        "count": COUNT,
        "target": str(target),
        "support": str(Path(launches.__file__).parent),
        **more,
    }
    asked["options"] |= options or {}
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


def check(found: Found, model: str, policies: dict[str, str], module: str) -> None:
    """Compare the tokens with those of transformers, alone and beside prompts seen before."""
    for name, text in policies.items():
        assert module in found[name]["runner"]
        assert set(found[name]["backend"]) == {"triton"}
        wanted = by_transformers(model, text, PROMPTS, COUNT)
        assert found[name]["answers"] == [wanted, wanted], text


@pytest.mark.parametrize(
    "texts", [POLICIES, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_tokens_are_those_of_transformers(
    tmp_path: Path, weights: str, statistics: str, texts: tuple[str, ...]
) -> None:
    """Whatever the runner does before the first request, which changes nothing."""
    policies = {each: each.format(statistics) for each in texts}
    found = run(tmp_path, weights, policies, v2=True)
    check(found, weights, policies, "vllm.v1.worker.gpu.model_runner")


@pytest.mark.slow
def test_tokens_are_those_of_transformers_in_the_other_runner(tmp_path: Path, weights: str) -> None:
    policies = {each: each for each in POLICIES}
    found = run(tmp_path, weights, policies, v2=False)
    check(found, weights, policies, "vllm.v1.worker.cpu_model_runner")


def test_decode_steps_over_slots_are_graphs_and_wait_for_nothing(
    tmp_path: Path, weights: str
) -> None:
    """With asynchronous scheduling, in which every wait for the device delays the next step.

    Launches of decode steps are captured before the first request, and repeated with the requests'
    tokens and padding. Each step is made again where what a GPU has cannot be read, and copies from
    the host that would wait raise.
    """
    policies = {"k8v4": "k8v4"}
    found = run(tmp_path, weights, policies, v2=True, **GRAPHS, watch=["k8v4"])
    check(found, weights, policies, "vllm.v1.worker.gpu.model_runner")
    slots = found["k8v4"]
    assert (slots["scheduler"], slots["graphs"]) == ("AsyncScheduler", "FULL_DECODE_ONLY")
    assert slots["replayed"] == [4] * 2 * (COUNT - 1)  # two requests, and padding
    decoding, prompts = [[1, 1, 0, 0], 0], [[len(each) for each in reversed(PROMPTS)], 0]
    assert slots["steps"] == [prompts, *[decoding] * (COUNT - 1)] * 2  # 0 tensors are copied


@pytest.mark.parametrize(
    "texts",
    [
        POLICIES[1:],
        pytest.param(
            ("k8v4:window=8", "streaming:budget=16+k8v4", "zack:file={},rate=0.4"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["some", "others"],
)
def test_decode_steps_over_pages_are_graphs(
    tmp_path: Path, weights: str, statistics: str, texts: tuple[str, ...]
) -> None:
    """No layer of the model is called in them; requests begin and end between."""
    policies = {each: each.format(statistics) for each in texts}
    found = run(tmp_path, weights, policies, v2=True, **GRAPHS)
    check(found, weights, policies, "vllm.v1.worker.gpu.model_runner")
    for each in found.values():
        assert (each["scheduler"], each["graphs"]) == ("AsyncScheduler", "FULL_DECODE_ONLY")
        assert each["replayed"] == [4] * 2 * (COUNT - 1)


def test_a_prompt_that_ends_with_a_chunk_of_one_token_is_in_no_graph(
    tmp_path: Path, weights: str
) -> None:
    """Which vLLM would launch for it, as for a generated token."""
    policies = {"pages": "k8v4:window=64"}  # all that a chunk attends to is as it was computed
    options = {"max_num_batched_tokens": len(PROMPTS[0]) - 1}
    found = run(
        tmp_path, weights, policies, v2=True, **GRAPHS, options=options, prompts=PROMPTS[:1]
    )
    wanted = by_transformers(weights, policies["pages"], PROMPTS[:1], COUNT)
    assert found["pages"]["answers"] == [wanted, wanted]
    assert found["pages"]["replayed"] == [1] * 2 * (COUNT - 1)


@pytest.mark.slow
def test_policies_that_observe_generated_queries_are_in_no_graph(
    tmp_path: Path, weights: str
) -> None:
    policies = {"leankv": "leankv"}
    found = run(tmp_path, weights, policies, v2=True, **GRAPHS)
    check(found, weights, policies, "vllm.v1.worker.gpu.model_runner")
    assert (found["leankv"]["graphs"], found["leankv"]["replayed"]) == ("NONE", [])
