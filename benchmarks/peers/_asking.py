"""Asking a model of transformers over its caches: the same loop for ours and for peers.

What happens is what `kv_eval.evaluate` does: a prompt is read and compressed, then a question is
read over what is held, and an answer generated greedily or a text scored token by token. Samples
run one at a time, as some presses take any batch for its first sequence. The version of
transformers differs from one environment to the other, so only what all have is used; positions are
given, as a cache that let tokens go does not know them.
"""

import gc
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, TextIO

import torch
from _held import held
from _widened import needed, widen
from _work import FULL, Ask, Key, Row, Work, named, put
from torch import Tensor
from torch.nn.functional import cross_entropy

STEPS: Final = 16  # of decoding that are timed


def nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A cache that has read a prompt."""

    cache: Any
    beside: tuple[Tensor, ...] = ()  # what it holds outside of the cache, such as masks
    counted: int | None = None  # bytes by its own accounting; None: those of its tensors
    prepare: Callable[[], None] = nothing  # is called before the cache is read
    stepwise: bool = False  # whether a question has to be read token by token


Begin = Callable[[str, Tensor], Reading]  # one way, by its own program alone
Read = Callable[[Sequence[str], Tensor], Mapping[str, Reading | Exception]]  # many at once


def load(folder: str) -> Any:
    """Load the model in bfloat16, with the attention that all environments have."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    if needed():
        widen(model)
    return model.eval()


def token_bytes(model: Any) -> int:
    """Bytes of a token's keys and values in all layers, uncompressed."""
    config = model.config
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def passed(model: Any, cache: Any, tokens: Tensor, begin: int) -> Tensor:
    """Read tokens (1, L), the first at position `begin`; give the logits after the last (1, V)."""
    positions = torch.arange(begin, begin + tokens.shape[1])[None]
    name = (
        "past_key_values" if "past_key_values" in signature(model.forward).parameters else "cache"
    )
    given = {name: cache}  # another name since transformers 5.24
    out = model(input_ids=tokens, position_ids=positions, **given, use_cache=True, logits_to_keep=1)
    logits: Tensor = out.logits
    return logits[:, -1].float()


def answered(
    model: Any, reading: Reading, ask: Ask, ends: Collection[int]
) -> tuple[list[int], float | None]:
    """Ask a cache its question: the tokens of its answer, or nats per token of its target."""
    reading.prepare()
    place = len(ask.prompt)
    question = torch.tensor([ask.question])
    logits = torch.empty(0)
    for piece in question.split(1 if reading.stepwise else question.shape[1], dim=1):
        logits = passed(model, reading.cache, piece, place)
        place += piece.shape[1]
    if ask.target:
        return [], _nats(model, reading.cache, logits, ask.target, place)
    stops = ends if ask.stop else ()
    return _answer(model, reading.cache, logits, ask.new_tokens, place, stops), None


@torch.inference_mode()
def run(model: Any, work: Work, read: Read, out: TextIO) -> None:
    """Answer all that is asked, prompt by prompt; what a way fails at becomes a row that says so.

    Raises:
        Exception: the full cache failed.
    """
    for cell, i, ask, ways in work.open():
        began = time.perf_counter()
        readings = dict(read(ways, torch.tensor([ask.prompt])))
        shared = (time.perf_counter() - began) / len(ways)
        for way in ways:
            reading = readings.pop(way)
            try:
                if isinstance(reading, Exception):
                    raise reading
                put(out, _row(model, cell.key(way, i), reading, ask, work.ends, shared))
            except Exception as error:  # whatever a peer raises is what is to be said of it
                if way == FULL:
                    raise
                traceback.print_exception(error)
                line = (str(error).strip().splitlines() or [""])[0]
                said = f"{type(error).__name__}: {line}"[:200]
                put(out, named(cell.key(way, i)) | {"error": said})
            del reading
            gc.collect()


@torch.inference_mode()
def clock(model: Any, work: Work, begin: Begin, out: TextIO) -> None:
    """Time a prompt's pass and steps after it, all ways in turn; the first round is unseen."""
    cell = work.cells[0]
    prompt = torch.tensor([cell.asks[0].prompt])
    for i in range(work.rounds + 1):
        for way in cell.ways if i % 2 == 0 else cell.ways[::-1]:
            began = time.perf_counter()
            reading = begin(way, prompt)
            read = time.perf_counter()
            reading.prepare()
            token = torch.zeros(1, 1, dtype=torch.long)
            for step in range(STEPS):
                logits = passed(model, reading.cache, token, prompt.shape[1] + step)
                token = logits.argmax(-1)[:, None]
            ended = time.perf_counter()
            if i:
                took = {"prefill": read - began, "decode": (ended - read) / STEPS}
                put(out, {"way": way, "round": i, **took})
            del reading
            gc.collect()


def _row(
    model: Any, key: Key, reading: Reading, ask: Ask, ends: Collection[int], shared: float
) -> Row:
    began = time.perf_counter()
    size = held(reading.cache, *reading.beside)
    tokens, nats = answered(model, reading, ask, ends)
    return named(key) | {
        "kv_bytes": size.tensors if reading.counted is None else reading.counted,
        "storage_bytes": size.storages,
        "full_bytes": token_bytes(model) * len(ask.prompt),
        "tokens": tokens,
        "nats": nats,
        "seconds": round(shared + time.perf_counter() - began, 3),
    }


def _answer(
    model: Any, cache: Any, logits: Tensor, count: int, place: int, ends: Collection[int]
) -> list[int]:
    """Up to `count` tokens, before one that ends the answer; the last is not put into the cache."""
    tokens: list[int] = []
    while True:
        token = int(logits.argmax(-1))
        if token in ends:
            return tokens
        tokens.append(token)
        if len(tokens) == count:
            return tokens
        logits = passed(model, cache, torch.tensor([[token]]), place + len(tokens) - 1)


def _nats(model: Any, cache: Any, logits: Tensor, target: tuple[int, ...], place: int) -> float:
    """Mean nats per token of the target, which is read token by token."""
    total = 0.0
    for i, token in enumerate(target):
        if i:
            logits = passed(model, cache, torch.tensor([[target[i - 1]]]), place + i - 1)
        total += float(cross_entropy(logits.double(), torch.tensor([token])))
    return total / len(target)
