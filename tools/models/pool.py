"""Check many architectures in a few processes, each with a time limit."""

import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Final

SECONDS: Final = 120  # for one architecture
MEMORY: Final = 10 << 30  # bytes of address space of a process
PER_PROCESS: Final = 100  # architectures, after which a process is renewed


def checked(names: Iterable[tuple[str, str]], processes: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each architecture and variant, in the order in which they end."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _begin, maxtasksperchild=PER_PROCESS) as pool:
        yield from pool.imap_unordered(_check, names)


def _begin() -> None:
    import resource

    import torch

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)


def _check(name: tuple[str, str]) -> dict[str, Any]:
    from tools.models.check import check, said

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    begin = time.perf_counter()
    try:
        row = check(*name)
    except BaseException as error:
        row = {"architecture": name[0], "variant": name[1], "result": "wrong", "said": said(error)}
    finally:
        signal.alarm(0)
    return row | {"seconds": round(time.perf_counter() - begin, 2)}
