"""The requests of an engine over one pool of pages: prefill alone, decode together."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kv_policy import Budget
from kv_runtime.cache import PolicyCache
from kv_runtime.measure import RequestHeld, held_by
from kv_runtime.token_rows import TokenRows


@dataclass(frozen=True, slots=True)
class RequestStep:
    """What an engine's step does for one request."""

    request: str
    computed: int  # tokens before the step; 0 begins it, also after a preemption
    tokens: int  # of the step
    prompt: int  # tokens of the prefill; after a preemption, the generated ones too
    budget: Budget | None = None  # its own, instead of the policy's
    serial: int = 0  # of this time that it begins; no other request, or time, has it
    refused: str | None = None  # why it cannot be served: it fails with this sentence

    @property
    def is_prefill(self) -> bool:
        """Whether the tokens are of the prompt."""
        return self.computed < self.prompt

    @property
    def is_partial_prefill(self) -> bool:
        """Whether a later step prefills the rest of the prompt."""
        return self.computed + self.tokens < self.prompt


@dataclass(frozen=True, slots=True)
class RequestRows:
    """Which rows of a step's tensors are the tokens of which request."""

    key: tuple[int, ...]  # of each request: its key in `RequestBatch.begin`
    start: tuple[int, ...]  # its first row, and last of all the number of rows


@dataclass(slots=True)
class RequestBatch:
    """The caches of all requests of a worker: one for each prefill, one for all that decode.

    A step calls `begin` once, `attend` for every layer in order, and reads `held` and `failed`
    after. What fails of one request, in a policy for example, ends that request alone.

    Attributes:
        empty: a cache without sequences, over the pool of all.
        scale: of the products of queries and keys.
        tell: is called with the request and the error when a request fails.
        prefills: caches of the requests whose prompt is not whole yet.
        decoding: the cache of all others; None: there are none.
        names: of the sequences of `decoding`.
        serials: of the requests that are held.
        failed: serials of requests that failed and are not gone yet.
    """

    empty: PolicyCache
    scale: float
    tell: Callable[[str, Exception], None]
    prefills: dict[str, PolicyCache] = field(default_factory=dict)
    decoding: PolicyCache | None = None
    names: list[str] = field(default_factory=list)
    _steps: Mapping[int, RequestStep] = field(default_factory=dict)  # of the step
    _parts: list[TokenRows] = field(default_factory=list)  # of the step
    _lost: list[slice | Tensor] = field(default_factory=list)  # rows of requests that failed
    serials: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def begin(self, steps: Mapping[int, RequestStep], gone: Iterable[str]) -> None:
        """Begin a step, and free what requests held that are gone or begin again.

        Args:
            steps: what the step does, by a key that the engine names a request by in its tensors.
            gone: requests that finished, were cancelled or preempted.
        """
        self._steps, self._parts, self._lost = steps, [], []
        again = (step.request for step in steps.values() if step.computed == 0)
        self._drop({*gone, *again})
        self.serials |= {step.request: step.serial for step in steps.values()}

    def compress(self) -> set[str]:
        """Compress what decodes as far as the policy allows, and name the requests."""
        found: set[str] = set()
        if self.decoding is not None and self.decoding.batch is not None:
            try:
                room = self.decoding.batch.a_page_each
                found = {self.names[i] for i in self.decoding.compress(room)}
            except Exception as error:
                self._fail(self.decoding, error)
            self._expel()
        return found

    def attend(
        self,
        layer: int,
        rows: RequestRows,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
    ) -> None:
        """Attend over the step's tokens in one layer and store them; layers come in order.

        Rows of requests that failed become zero.
        """
        if layer == 0:
            self._open(rows)
        whole = self._parts
        for part in whole:
            try:
                part.attend(layer, query, key, value, self.scale, output)
            except Exception as error:
                self._lose(part, error)
        if layer == self.empty.shape.layers - 1:
            self._close()
        for row in self._lost:
            output[row] = 0

    def held(self, *, kept: bool) -> dict[str, RequestHeld]:
        """Return what every request holds that holds something.

        Args:
            kept: whether to count kept tokens too.
        """
        found: dict[str, RequestHeld] = {}
        caches = [([name], cache) for name, cache in self.prefills.items()]
        if self.decoding is not None:
            caches.append((self.names, self.decoding))
        for names, cache in caches:
            if cache.batch is not None:
                found |= zip(names, held_by(cache.batch, kept=kept), strict=True)
        return found

    def _open(self, rows: RequestRows) -> None:
        found: dict[str, int] = {}
        for i, key in enumerate(rows.key):
            step, begin, end = self._steps[key], rows.start[i], rows.start[i + 1]
            if step.request in self.failed:
                self._lost.append(slice(begin, end))
            elif step.is_prefill or step.refused:
                self._prefill(step, begin, end)
            else:
                found[step.request] = begin
        if found:
            assert self.decoding is not None, "a request that decodes has had its prefill"
            row = torch.tensor([[found.get(name, -1)] for name in self.names])
            part = TokenRows.of(self.decoding, row, self.empty.device)
            self._begin(part, prompt=False, more=False)

    def _prefill(self, step: RequestStep, begin: int, end: int) -> None:
        """Begin the pass of a prompt, or of a part of one."""
        try:
            if step.refused is not None:
                raise ValueError(step.refused)
            if step.computed == 0:
                self.prefills[step.request] = self.empty.another(step.budget)
            cache = self.prefills[step.request]
        except Exception as error:
            self._note(step.request, error)
            self._lost.append(slice(begin, end))
            self._let_go({step.request})
            return
        part = TokenRows.of(cache, torch.arange(begin, end)[None], self.empty.device)
        self._begin(part, prompt=True, more=step.is_partial_prefill)

    def _begin(self, part: TokenRows, *, prompt: bool, more: bool) -> None:
        self._parts = [*self._parts, part]
        try:
            part.begin(prompt=prompt, more=more)
        except Exception as error:
            self._lose(part, error)

    def _close(self) -> None:
        """Let requests whose prefill is whole decode, together with the others."""
        self._expel()
        for step in self._steps.values():
            whole = step.is_prefill and not step.is_partial_prefill
            if whole and step.request in self.prefills:
                cache = self.prefills.pop(step.request)
                self.names.append(step.request)
                if self.decoding is None:
                    self.decoding = cache
                else:
                    self.decoding.join(cache)

    def _lose(self, part: TokenRows, error: Exception) -> None:
        """Let the requests of a part fail, in whatever layer."""
        self._parts = [each for each in self._parts if each is not part]
        self._lost.append(part.target)
        self._fail(part.cache, error)

    def _fail(self, cache: PolicyCache, error: Exception) -> None:
        """Let the requests of a cache fail, with all that is held for them."""
        if isinstance(error, torch.AcceleratorError):
            raise error  # nothing more runs on this device
        names = self.names if cache is self.decoding else []
        for name in [*names, *(name for name, each in self.prefills.items() if each is cache)]:
            self._note(name, error)
        cache.release()
        if cache is self.decoding:
            self.decoding, self.names = None, []
        self.prefills = {name: each for name, each in self.prefills.items() if each is not cache}

    def _expel(self) -> None:
        """Let requests fail that a policy failed about, of those that decode."""
        errors = {} if self.decoding is None else self.decoding.failures()
        for i, error in errors.items():
            self._note(self.names[i], error)
        if errors:
            self._let_go({self.names[i] for i in errors})

    def _note(self, name: str, error: Exception) -> None:
        self.tell(name, error)
        self.failed[name] = self.serials[name]

    def _drop(self, gone: set[str]) -> None:
        for name in gone:
            self.failed.pop(name, None)
            self.serials.pop(name, None)
        for name in gone & self.prefills.keys():
            self.prefills.pop(name).release()
        self._let_go(gone)

    def _let_go(self, gone: Collection[str]) -> None:
        """Free what requests that decode hold."""
        kept = [i for i, name in enumerate(self.names) if name not in gone]
        if self.decoding is None or len(kept) == len(self.names):
            return
        self.names = [self.names[i] for i in kept]
        if kept:
            self.decoding.select(torch.tensor(kept))
        else:
            self.decoding.release()
            self.decoding = None
