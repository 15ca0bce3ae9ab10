"""Kernels compiled for GPUs that need not be there, and what the compiler made of them."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

SHARED: Final = {80: 166_912, 90: 232_448}  # bytes that a program may have, by architecture
BINARIES: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and what it would have been called with."""

    kernel: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.fn.__name__)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What it is compiled for: types of tensors, numbers and constants."""
        every = (*self.arguments, *self.named.items())
        return tuple(_kind_of(each) for each in every)


def _kind_of(argument: Any) -> str:
    if isinstance(argument, tuple):
        return str([_kind_of(each) for each in argument])
    return str(argument.dtype) if isinstance(argument, torch.Tensor) else repr(argument)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Note what kernels are launched with, and launch none."""
    launches: list[Launch] = []

    def note(kernel: Any, *arguments: Any, grid: object, warmup: bool, **named: Any) -> None:
        launches.append(Launch(kernel, arguments, named))

    with patch.object(JITFunction, "run", note):
        yield launches


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """What some work launches."""
    with recorded() as launches:
        work()
    return launches


def compiled(launch: Launch, architecture: int) -> dict[str, object]:
    """Compile as the first call on that GPU would; say what it takes, per thread or program.

    Raises:
        triton.CompilationError: it cannot be compiled.
    """
    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    named = {"debug": False, **launch.named}
    bound, special, options = binder(*launch.arguments, **named)
    packed = launch.kernel._pack_args(backend, named, bound, special, options)
    options, signature, constants, attributes = packed
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=target, options=options.__dict__)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    used = {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    spilled = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return {
        "registers": used["REG"],
        "spills": spilled + used["STACK"] + used["LOCAL"],
        "shared": int(made.metadata.shared),
        "shared_most": SHARED[architecture],
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
        "tensor_core": len(re.findall(r"\b(?:HMMA|HGMMA|IMMA)\b", code)),
        "async_copies": len(re.findall(r"\bLDGSTS\b", code)),
        "loop": len(_loop(code)),
        "loop_shared_stores": sum("STS." in each and "128" in each for each in _loop(code)),
    }


def _loop(code: str) -> list[str]:
    """The instructions of the loop over tiles: the one with the most tensor-core products."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = []
    for line in code.splitlines():
        label = re.match(r"\s*(\.L\w+):", line)
        if label:
            labels[label.group(1)] = len(instructions)
        found = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line)
        if not found:
            continue
        instructions.append(found.group(1))
        back = re.search(r"\bBRA\S*\s+.*?`\((\.L\w+)\)", found.group(1))
        if back and back.group(1) in labels:
            loops.append(instructions[labels[back.group(1)] :])
    products = [sum(bool(re.search(r"\b(HMMA|HGMMA|IMMA)\b", i)) for i in each) for each in loops]
    return min(
        (each for each, count in zip(loops, products, strict=True) if count == max(products)),
        key=len,
        default=[],
    )


@cache
def _binary(name: str) -> str:
    path = BINARIES / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: this build of triton brings no {name}")
    return str(path)


def _run(name: str, *arguments: str) -> str:
    command = (_binary(name), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
