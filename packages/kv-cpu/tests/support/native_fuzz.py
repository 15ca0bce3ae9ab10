"""Calls native operators with possibly invalid arguments, many of them in one process.

Each call either returns what the reference computes, or raises and changes nothing; bytes outside
its arguments never change. A process that ends is restarted after the call that ended it:

    python native_fuzz.py SEED CALLS
"""

import contextlib
import json
import mmap
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import native_maps
import native_rows
from kv_cpu import missing, runnable
from native_calls import Arena, Arg, Call, Maker, bend, bytes_of

OUTPUT = {"decode_rows": 4}  # index of an argument that is set to rounded results
MEMORY = 8 << 30  # address space that a call may add to its process
HANGS = 120  # maximum seconds of a call


def call_of(seed: int, index: int) -> Call:
    """Return a call by its number, independent of earlier calls."""
    random = Random(f"{seed} {index}")
    call = Maker(random, runnable()).call()
    for _ in range(random.choice([0, 1, 1, 1, 1, 2, 2, 3, 5])):
        call = bend(call, random)
    return call


def tensors_in(args: list[Arg]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list):
            yield from tensors_in(arg)


def mapped(args: list[Arg], f: Any) -> list[Any]:
    """Return the arguments with f applied to each tensor; repeated tensors remain identical."""
    done: dict[int, Any] = {}

    def one(arg: Arg) -> Any:
        if isinstance(arg, list):
            return [one(each) for each in arg]
        if not isinstance(arg, Tensor):
            return arg
        if id(arg) not in done:
            done[id(arg)] = f(arg)
        return done[id(arg)]

    return [one(arg) for arg in args]


def place(arena: Arena, x: Tensor, random: Random) -> Tensor:
    """Move most tensors to guarded memory; a few stay in separate memory, for sanitizers."""
    here = x.device.type == "cpu" and not torch._C._is_cow_tensor(x)
    odd = here and x.data_ptr() % max(x.element_size(), 1)
    if not here or odd or random.random() < 0.2:
        return x
    return arena.put(x)


def fault_of(call: Call, arena: Arena, random: Random) -> tuple[str | None, bool]:
    """Return the fault of a call, or None, and whether it raised."""
    arena.clear()
    shrunk = [x for x in tensors_in(call.args) if x.device.type == "cpu" and _is_short(x)]
    args = call.args if shrunk else mapped(call.args, lambda x: place(arena, x, random))
    whole = [] if shrunk else [x for x in tensors_in(args) if x.device.type == "cpu"]
    before = [bytes_of(x) for x in whole]
    expected, reason = None, "an argument has no memory"
    copies = [] if call.hopeless or shrunk else mapped(args, torch.clone)
    if copies:
        try:
            expected = native_rows.reference_of(call.name)(*copies)
        except Exception as error:  # any error of the reference
            reason = f"the reference raises {type(error).__name__}: {error}"
    try:
        found = getattr(torch.ops.kv_cpu, call.name)(*args)
        found = [found] if isinstance(found, Tensor) else found
    # TypeError, and NotImplementedError, which is a RuntimeError, are raised by torch's dispatcher
    # for arguments of a wrong type. For a valid call, any error is a fault.
    except (RuntimeError, TypeError) as error:
        if "allocate memory" in str(error) or "bad_alloc" in str(error):
            return f"it allocates excessive memory: {error}", True
        same = all(torch.equal(a, bytes_of(x)) for a, x in zip(before, whole, strict=True))
        if not same:
            return f"refused, and changed its arguments: {error}", True
        if "/" in str(error) and ".cpp" in str(error):
            return f"its message names a file: {error}", True
        if arena.spoilt():
            return f"refused, and changed bytes beside its arguments: {error}", True
        return (None if call.bent else f"a valid call is refused: {error}"), True
    if arena.spoilt():
        return "bytes beside its arguments changed", False
    if expected is None:
        return f"not refused; {reason}", False
    output = args[OUTPUT[call.name]] if call.name in OUTPUT else None
    results = [*([] if output is None else [output]), *(found or [])]
    for i, (bounds, x) in enumerate(zip(expected, results, strict=True)):
        if not bounds.hold(x):
            return f"result {i} is {x.flatten()[:8].tolist()}, not {bounds}", False
    if call.name == "decode_rows":
        native_rows.settle_scores(args, copies)
        native_maps.settle_maps(args, copies)
    for i, (x, y) in enumerate(zip(tensors_in(args), tensors_in(copies), strict=True)):
        if x is not output and not _equal(x, y):
            return f"tensor {i} differs from the reference", False
    return None, False


def _is_short(x: Tensor) -> bool:
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
    end = (x.storage_offset() + reach) * x.element_size()
    return x.numel() > 0 and end > x.untyped_storage().nbytes()


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(bytes_of(x), bytes_of(y))


def work(seed: int, first: int, calls: int, progress: Path) -> None:
    """Run calls first .. calls - 1; write each number before its call."""
    warnings.simplefilter("ignore")
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    _limit_memory()
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as at:
        arena, refused = Arena(), 0
        for index in range(first, calls):
            at[:8] = index.to_bytes(8, "little")
            call = call_of(seed, index)
            torch.set_num_threads(1 + 2 * (index % 4 == 0))
            wrong, stopped = fault_of(call, arena, Random(index))
            refused += stopped
            if wrong is not None:
                print(json.dumps([index, call.name, list(call.bent), wrong[:2000]]), flush=True)
        print(json.dumps({"calls": calls - first, "refused": refused}), flush=True)


def _limit_memory() -> None:
    """Let excessive allocations fail in their call; sanitizers reserve too many addresses."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    if taken < 1 << 40:
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def fuzz(seed: int, calls: int) -> tuple[list[list[Any]], dict[str, int]]:
    """Run many calls in another process; return the faults, and how many calls raised."""
    faults: list[list[Any]] = []
    done = {"calls": 0, "refused": 0}
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while first < calls:
            progress.write_bytes(first.to_bytes(8, "little"))
            command = [sys.executable, __file__, str(seed), str(calls), str(first), str(progress)]
            path = os.pathsep.join(each for each in sys.path if each)
            with subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            ) as worker:
                out, err = _ended(worker, calls - first)
            for line in out.splitlines():
                read = json.loads(line)
                if isinstance(read, list):
                    faults.append(read)
                else:
                    done = {key: done[key] + read[key] for key in done}
            if worker.returncode == 0:
                break
            index = int.from_bytes(progress.read_bytes()[:8], "little")
            call = call_of(seed, index)
            end = f"the process ended with {worker.returncode}: {err[-1500:]}"
            faults.append([index, call.name, list(call.bent), end])
            first = index + 1
    return faults, done


def _ended(worker: subprocess.Popen[str], calls: int) -> tuple[str, str]:
    try:
        return worker.communicate(timeout=HANGS + calls)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.communicate()


def main() -> None:
    seed, calls, *rest = sys.argv[1:]
    if rest:
        work(int(seed), int(rest[0]), int(calls), Path(rest[1]))
        return
    faults, done = fuzz(int(seed), int(calls))
    with contextlib.suppress(BrokenPipeError):
        for fault in faults:
            print(*fault, sep="\n  ")
        print(f"{done}, {len(faults)} faults")


if __name__ == "__main__":
    main()
