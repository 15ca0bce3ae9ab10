"""The token capacity that vLLM reports."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kv_serve.vllm.names import KEY


def token_capacity(
    model_folder: str | Path,
    policy: str | None,
    kv_bytes: int,
    *,
    max_model_len: int | None = None,
    block_size: int | None = None,
) -> int:
    """Start vLLM in a separate process and return the "KV cache size" that it reports, in tokens.

    Args:
        model_folder: a model that vLLM can serve.
        policy: its text; None for vLLM's own cache.
        kv_bytes: memory for keys and values.
        max_model_len: tokens of the longest request; None for the model's own.
        block_size: tokens per block; None for vLLM's default.

    Raises:
        RuntimeError: vLLM is not installed or did not start; the message ends with its output.
    """
    options: dict[str, Any] = {
        "model": str(model_folder),
        "kv_cache_memory_bytes": kv_bytes,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "additional_config": {} if policy is None else {KEY: policy},
        "max_model_len": max_model_len,
        "block_size": block_size,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "capacity"
        run = subprocess.run(
            (sys.executable, "-m", "kv_eval.vllm.capacity", json.dumps(given), str(answer)),
            env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if run.returncode or not answer.exists():
            raise RuntimeError(f"vLLM did not start with {given}; output:\n{run.stdout[-2000:]}")
        return int(answer.read_text())


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("options", type=json.loads, help="of vllm.LLM, as JSON")
    parser.add_argument("answer", type=Path, help="file to write the number of tokens to")
    arguments = parser.parse_args()
    from vllm import LLM

    cache = LLM(**arguments.options).llm_engine.vllm_config.cache_config
    arguments.answer.write_text(str(cache.kv_cache_size_tokens))


if __name__ == "__main__":
    _main()
