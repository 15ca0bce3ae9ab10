"""llama.cpp by llama-cpp-python, with flash attention. A way is `WEIGHTS:CACHE`, as `bf16:q8_0`."""

import ctypes
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import llama_cpp as lib
import numpy as np
from _gguf import weights
from _protocol import Opened, Room, answers, own_output, put, room_given, versions
from numpy.typing import NDArray

TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0, "q4_0": lib.GGML_TYPE_Q4_0}
BATCH = 2048  # tokens of a prompt that are given at once, as llama.cpp has it by default


@contextmanager
def batch_of(
    tokens: Sequence[int], sequences: Sequence[int], begin: int
) -> Iterator[lib.llama_batch]:
    """Tokens of one sequence from a position on, or one token of each of several at the same."""
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    one = len(sequences) == 1
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, begin + i if one else begin
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequences[0 if one else i]
        batch.logits[i] = not one or i == len(tokens) - 1
    batch.n_tokens = len(tokens)
    try:
        yield batch
    finally:
        lib.llama_batch_free(batch)


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt that was read, and can be copied."""

    state: ctypes.Array[ctypes.c_uint8]
    place: int
    token: int  # the next one


class Context:
    """A context whose sequences hold the same text in memory of their own."""

    def __init__(
        self, model: lib.llama_model_p, cache: str, threads: int, batch: int, longest: int
    ) -> None:
        """Make room for `batch` sequences of `longest` tokens."""
        given = lib.llama_context_default_params()
        each = -(-longest // 256) * 256
        given.n_ctx, given.n_seq_max, given.kv_unified = each * batch, batch, False
        given.n_batch = BATCH
        given.n_threads = given.n_threads_batch = threads
        given.type_k = given.type_v = TYPES[cache]
        given.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.batch, self.place = batch, 0
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.context = lib.llama_init_from_model(model, given)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context with a cache of {cache}")
        self.tokens: list[int] = []

    def decode(self, tokens: Sequence[int], sequences: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last token of each sequence [S, V]."""
        with batch_of(tokens, sequences, self.place) as batch:
            if code := lib.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode gives {code}")
        self.place += len(tokens) if len(sequences) == 1 else 1
        found = [lib.llama_get_logits_ith(self.context, i - len(sequences)) for i in sequences]
        return np.stack([np.ctypeslib.as_array(each, (self.vocabulary,)) for each in found])

    def read(self, prompt: Sequence[int]) -> NDArray[np.float32]:
        """Read a prompt into the first sequence."""
        logits = np.empty((0, 0), dtype=np.float32)
        for begin in range(0, len(prompt), BATCH):
            logits = self.decode(prompt[begin : begin + BATCH], [0])
        return logits

    def state(self) -> ctypes.Array[ctypes.c_uint8]:
        """What the first sequence holds."""
        size = lib.llama_state_seq_get_size(self.context, 0)
        found = (ctypes.c_uint8 * size)()
        lib.llama_state_seq_get_data(self.context, found, size, 0)
        return found

    def fill(self, read: Read) -> None:
        """Copy what the first sequence held to those that are empty.

        Raises:
            RuntimeError: there is no room.
        """
        for i in range(1, self.batch):
            if not lib.llama_state_seq_set_data(self.context, read.state, len(read.state), i):
                raise RuntimeError(f"llama.cpp has no room for sequence {i}")
        self.place, self.tokens = read.place, self.batch * [read.token]

    def step(self) -> None:
        """Decode a token of each sequence."""
        if self.batch == 1:
            logits = self.decode(self.tokens, [0])
        else:
            logits = self.decode(self.tokens, range(self.batch))
        self.tokens = [int(each) for each in logits.argmax(-1)]

    def free(self) -> None:
        """Free all memory."""
        lib.llama_free(self.context)


class Llama:
    """Models by their weights, and contexts that are open."""

    def __init__(self, model: str, room: Room) -> None:
        """Load nothing yet."""
        self._path, self._room = model, room
        self._models: dict[str, lib.llama_model_p] = {}
        self._open: dict[str, Context] = {}

    def open(self, way: str, prompt: Sequence[int], batch: int, room: int) -> Opened:
        """Read the prompt alone, and copy what is held to every sequence."""
        warm = self._context(way, 1, 128)
        warm.read(prompt[:64])  # all its parts have run once
        warm.free()
        self._open[way] = context = self._context(way, batch, len(prompt) + room)
        began = time.perf_counter()
        token = int(context.read(prompt)[0].argmax())
        first = time.perf_counter() - began
        read = Read(context.state(), len(prompt), token)
        context.fill(read)
        return Opened(first, batch * len(read.state))

    def steps(self, way: str, count: int) -> list[float]:
        """Decode greedily."""
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self._open[way].step()
            seconds.append(time.perf_counter() - began)
        return seconds

    def close(self, way: str) -> None:
        """Free the context."""
        self._open.pop(way).free()

    def nats(self, way: str, prompt: Sequence[int], target: Sequence[int]) -> float:
        """Feed the target token by token."""
        context = self._context(way, 1, len(prompt) + len(target))
        logits, total = context.read(prompt), 0.0
        for i, token in enumerate(target):
            if i:
                logits = context.decode([target[i - 1]], [0])
            row = logits[0].astype(np.float64)
            total += float(np.logaddexp.reduce(row) - row[token])
        context.free()
        return total / len(target)

    def _context(self, way: str, batch: int, longest: int) -> Context:
        kind, _, cache = way.partition(":")
        if kind not in self._models:
            path = weights(self._path, kind)
            given = lib.llama_model_default_params()
            given.use_extra_bufts = False  # its AMX code for quantized weights ends with SIGILL
            self._models[kind] = lib.llama_model_load_from_file(str(path).encode(), given)
        return Context(self._models[kind], cache, self._room.threads, batch, longest)


@lib.llama_log_callback
def silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Say only what is wrong."""
    if level >= 3:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """Answer what is asked."""
    out, (model, room) = own_output(), room_given()
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    put(out, versions("llama-cpp-python"))
    answers(Llama(model, room), sys.stdin, out)


if __name__ == "__main__":
    main()
