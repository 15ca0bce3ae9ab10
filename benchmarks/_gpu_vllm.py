"""A stock vLLM beside our policies in it, on models with random weights.

Cases `equal WAY` are of a small model in float32, whose greedy tokens stock vLLM and `raw` agree
on. Cases `speed WAY` are of eight layers of Llama-3.1-8B in bfloat16: as many tokens a second as
come from 32 requests of 2,048 tokens. Engines are in this process and run without compilation.
"""

import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from _gpu_child import Report
from _gpu_steps import config

STOCK: Final = "stock"
CASES: Final = (
    f"equal {STOCK}",
    "equal raw",
    f"speed {STOCK}",
    "speed k8v4",
    "speed kv-compress:rate=4+k8v4",
    "speed leankv",
)
LAYERS: Final = 8
REQUESTS, PROMPT, ANSWER = 32, 2048, 64
SETTINGS: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def served(report: Report, case: str) -> None:
    """Serve requests in one way."""
    os.environ.update(SETTINGS)
    kind, _, way = case.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(report, Path(folder), kind, way)
        if kind == "equal":
            (tokens,) = _answers(engine, 1, 40, 16)
            report.add("tokens", way=way, tokens=tokens)
            return
        requests, prompt, answer = (2, 40, 4) if report.quick else (REQUESTS, PROMPT, ANSWER)
        _answers(engine, 2, prompt, 4)  # compiles
        began = perf_counter()
        found = _answers(engine, requests, prompt, answer)
        seconds = perf_counter() - began
        made = sum(map(len, found))
        report.add("served", way=way, tokens=made, seconds=seconds, tokens_per_s=made / seconds)


def _engine(report: Report, folder: Path, kind: str, way: str) -> Any:
    from vllm import LLM

    small = kind == "equal" or report.quick
    if small:
        of = config(2, quick=report.quick, hidden=128, inner=128, vocabulary=1000)
    else:
        of = config(LAYERS, quick=False, hidden=4096, inner=14_336, vocabulary=32_000)
    of.head_dim = max(of.head_dim, 64)  # stock vLLM has kernels for it on every device
    of.architectures = ["LlamaForCausalLM"]
    of.save_pretrained(folder)
    room = {"kv_cache_memory_bytes": 1 << 26} if report.quick else {"gpu_memory_utilization": 0.7}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32" if small else "bfloat16",
        enforce_eager=True,
        max_model_len=256 if small else 4096,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
        seed=0,
        additional_config={} if way == STOCK else {"kv_policy": way},
        **room,
    )


def _answers(engine: Any, requests: int, prompt: int, answer: int) -> list[list[int]]:
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 1000, (requests, prompt), generator=draw).tolist()
    how = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": each} for each in prompts]
    return [list(x.outputs[0].token_ids) for x in engine.generate(given, how, use_tqdm=False)]
