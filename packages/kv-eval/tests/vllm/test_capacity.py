"""The capacity that vLLM states, asked of an engine in a process of its own."""

from pathlib import Path

import pytest

from kv_eval.vllm.capacity import token_capacity
from vllm_models import write_weights

CELLS = 2 * 2  # layers and KV heads of the tiny model, whose heads have 32 dimensions


def test_capacity_as_a_function_starts_an_engine_of_its_own(tmp_path: Path) -> None:
    write_weights(tmp_path)
    found = token_capacity(tmp_path, "k8v4", 1 << 22, max_model_len=512)
    assert found == (1 << 22) // (CELLS * 128 * 56) * 128


def test_capacity_of_what_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('this vLLM is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"(?s)did not start with .*this vLLM is broken"):
        token_capacity(tmp_path, "k8v4", 1 << 22)
