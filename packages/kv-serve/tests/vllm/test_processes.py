"""Engines in vLLM's own processes, which load kv-serve through the entry point only."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,"]
SCRIPT = """
import json, sys
from pathlib import Path

def found(engine, prompts, count):
    from vllm import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    settings = SamplingParams(temperature=0, max_tokens=count, logprobs=2, prompt_logprobs=1)
    told = []
    for answer in engine.generate(prompts, settings, use_tqdm=False):
        output = answer.outputs[0]
        seen = [*answer.prompt_logprobs[1:], *output.logprobs]
        told.append([output.token_ids, [{i: p.logprob.hex() for i, p in s.items()} for s in seen]])
    return {
        "ours": AttentionBackendEnum.CPU_ATTN.is_overridden(),
        "tokens": engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens,
        "answers": told,
    }

def main():
    from vllm import LLM

    options, prompts, count, target = json.loads(sys.argv[1])
    answers = found(LLM(enforce_eager=True, **options), prompts, count)
    Path(target).write_text(json.dumps(answers))

if __name__ == "__main__":
    main()
"""


class Run:
    """Run the script in its own process, with engines inside it or, vLLM's default, in another."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, object],
        prompts: Sequence[object],
        count: int,
        **environment: str,
    ) -> None:
        self.target = folder / "found.json"
        script = folder / "script.py"
        script.write_text(SCRIPT)
        given = json.dumps([options, prompts, count, str(self.target)])
        self.process = begin([sys.executable, str(script), given], **environment)

    def found(self) -> dict[str, object]:
        """Wait for the process to end, and return what the script wrote."""
        said = finish(self.process)
        assert self.process.returncode == 0, said
        return json.loads(self.target.read_text())


def begin(command: list[str], **environment: str) -> subprocess.Popen[str]:
    left_out = ("TORCH_COMPILE_DISABLE", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return subprocess.Popen(
        command,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=400)[0]
    finally:
        process.kill()


def test_without_a_policy_every_token_and_probability_is_as_without_the_plugin(
    start: Callable[..., AbstractContextManager["LLM"]],
    weights: str,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """Our engine is in this process, as the plugin was loaded before; one without is in another."""
    options = {"kv_cache_memory_bytes": 1 << 22, "max_model_len": 512, "skip_tokenizer_init": True}
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"}
    alone = Run(tmp_path, {"model": weights, **options}, asked, 32, VLLM_PLUGINS="", **inside)
    stock, names = alone.found(), {"__name__": "script"}
    exec(SCRIPT, names)
    with start(weights, **options) as engine:
        ours = json.loads(json.dumps(names["found"](engine, asked, 32)))
    assert (stock.pop("ours"), ours.pop("ours")) == (False, True)
    assert stock == ours


@pytest.mark.slow  # as the server's of test_server.py
@pytest.mark.model
def test_a_policy_reaches_the_processes_that_vllm_starts(smollm2: str, tmp_path: Path) -> None:
    options = {
        "model": smollm2,
        "kv_cache_memory_bytes": 1 << 26,
        "max_model_len": 512,
        "additional_config": {"kv_policy": "kv-compress:rate=2+k8v4"},
        # Statistics are sent to this process, but our connector was attached in another.
        "disable_log_stats": False,
    }
    found = Run(tmp_path, options, PROMPTS, 2, TORCH_COMPILE_DISABLE="1").found()
    k8v4 = (1 << 26) // (30 * 3 * 128 * 104) * 128
    assert 1.5 * k8v4 < found["tokens"] < 2 * k8v4
    assert [len(tokens) for tokens, _ in found["answers"]] == [2, 2]


def test_a_server_ends_with_the_reason_of_a_refusal(tiny: Callable[..., str]) -> None:
    # vLLM's own command needs a distribution named vllm, but the CPU builds have another name; this
    # is what it runs.
    server = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny())
    tiny_one = ("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager")
    options = (*tiny_one, "--kv-cache-memory-bytes", str(1 << 22), "--kv-cache-dtype", "fp8")
    policy = ("--additional-config", json.dumps({"kv_policy": "streaming"}))
    process = begin([*server, *options, *policy])
    said = finish(process)
    assert process.returncode != 0
    assert "kv_cache_dtype is fp8 and kv_policy is given too" in said
