"""The doctor's findings about cores and dtypes of a processor."""

import os
from pathlib import Path

import pytest

from kv_serve import processor
from kv_serve.processor import Threads, bfloat16_problems, thread_problems


@pytest.mark.parametrize(("text", "cores"), [("150000 100000", 1), ("max 100000", 64), ("", 64)])
def test_a_container_may_have_fewer_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(processor, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(64))
    assert processor.cores() == cores


def test_threads_that_wait_for_one_another_are_a_hint() -> None:
    assert not list(thread_problems(Threads(2, None, 2)))
    (problem,) = thread_problems(Threads(4, None, 2))
    assert "4 threads on 2 cores" in problem.what
    assert problem.remedy == "set OMP_NUM_THREADS=2"
    assert not problem.broken


@pytest.mark.parametrize(
    ("machine", "capability", "gpu", "slow"),
    [
        ("x86_64", "AVX2", False, True),
        ("AMD64", "DEFAULT", False, True),
        ("x86_64", "AVX512", False, False),
        ("x86_64", "AVX2", True, False),
        ("aarch64", "DEFAULT", False, False),
    ],
)
def test_slow_bfloat16_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, machine: str, capability: str, gpu: bool, slow: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    found = list(bfloat16_problems())
    assert len(found) == slow
    for problem in found:
        assert capability in problem.what
        assert "--dtype float32" in problem.remedy
        assert not problem.broken
