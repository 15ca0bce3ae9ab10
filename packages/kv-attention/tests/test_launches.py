"""Kernels are launched on the device of their tensors, which is `meta` here."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from triton.runtime.interpreter import GridExecutor
from triton.runtime.jit import JITFunction

from kv_attention import DenseTokens
from kv_attention.gpu.arguments import dense_part
from kv_attention.gpu.attention_mass import mass_of_pass, mass_of_step
from kv_attention.gpu.decode import decode
from kv_attention.gpu.prefill import attend_to_all
from kv_attention.gpu.tuning import Machine
from kv_policy import Observe

GPU = torch.device("meta")
MACHINE = Machine("interpreter", 2, False)
PLACED = Observe(None, skip=2)


@contextmanager
def launched() -> Iterator[list[tuple[str, torch.device | None]]]:
    """Note the kernels that are launched, and the device at that time; launch none."""
    current: list[torch.device] = []
    found: list[tuple[str, torch.device | None]] = []

    @contextmanager
    def launching_on(x: torch.Tensor) -> Iterator[None]:
        current.append(x.device)
        yield
        current.pop()

    def run(kernel: object, *given: object, **named: object) -> None:
        name = kernel.fn.__name__  # type: ignore[attr-defined]
        found.append((name, current[-1] if current else None))

    with ExitStack() as stack:
        for module in ("decode", "prefill", "attention_mass"):
            stack.enter_context(patch(f"kv_attention.gpu.{module}.launching_on", launching_on))
        stack.enter_context(patch.object(GridExecutor, "__call__", run))
        stack.enter_context(patch.object(JITFunction, "run", run))
        yield found


@pytest.mark.parametrize("L", [1, 6])
def test_every_kernel_is_launched_there(L: int) -> None:
    with launched() as found:
        q = torch.empty(2, 3, 2, L, 16, device=GPU)
        key = torch.empty(2, 3, 7, 16, device=GPU)
        place = torch.empty(2, 7, dtype=torch.long, device=GPU)
        parts = [dense_part(DenseTokens(key, key, place, full=True))] * 2
        places = [place[:, None]] * 2
        position = place[:, :L]
        if L == 1:
            done = decode(q, position, parts, 16, 1.0, MACHINE, watched=True)
            mass_of_step(done, position, parts, places, PLACED)
        else:
            done = attend_to_all(q, position, parts, 16, 1.0, MACHINE)
            mass_of_pass(q, position, done.lse, done.out, parts, places, 1.0, MACHINE, PLACED)
    names = {name for name, _ in found}
    step = {"plan_kernel", "decode_kernel", "combine_kernel", "mass_of_step_kernel"}
    assert names == (step if L == 1 else {"prompt_kernel", "mass_of_pass_kernel"})
    assert {device for _, device in found} == {GPU}
