"""The requests of an engine over one page pool: separate prefill, batched decode."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_policy import Budget
from kv_runtime.cache import PolicyCache
from kv_runtime.measure import HeldCopy, RequestHeld, held_numbers
from kv_runtime.token_rows import TokenRows


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request in an engine's step."""

    request: str
    computed: int  # tokens computed before the step; 0 starts the request, also after a preemption
    tokens: int  # in the step
    prompt: int  # tokens of the prefill, including generated ones after a preemption
    budget: Budget | None = None  # overrides the policy's budget
    serial: int = 0  # unique number of this start of the request
    refused: str | None = None  # why the request cannot be served; it fails with this message

    @property
    def is_prefill(self) -> bool:
        """Whether the step's tokens belong to the prompt."""
        return self.computed < self.prompt

    @property
    def is_partial_prefill(self) -> bool:
        """Whether a later step prefills the rest of the prompt."""
        return self.computed + self.tokens < self.prompt


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of each request in a step's tensors."""

    key: tuple[int, ...]  # each request's key in `RequestBatch.begin`
    start: tuple[int, ...]  # each request's first row, then the number of rows


@dataclass(slots=True)
class RequestBatch:
    """The caches of all requests of a worker: one per prefill, and one for all decoding requests.

    A step calls `begin` once, `attend` for every layer in order, and then reads `held` and
    `failed`. An error in one request, for example in a policy, ends only that request.

    Attributes:
        empty: a cache without sequences, over the shared pool.
        scale: the scale of attention logits.
        tell: called with the request and the error when a request fails.
        prefills: caches of requests with an unfinished prompt.
        decoding: the cache of all other requests; None: no request decodes.
        names: the requests of the sequences of `decoding`.
        serials: serials of all current requests.
        attended: whether the tokens of the step went through all layers, or there are none.
        failed: serials of failed requests that have not been freed.
    """

    empty: PolicyCache
    scale: float
    tell: Callable[[str, Exception], None]
    prefills: dict[str, PolicyCache] = field(default_factory=dict)
    decoding: PolicyCache | None = None
    names: list[str] = field(default_factory=list)
    _steps: Mapping[int, RequestStep] = field(default_factory=dict)  # of the current step
    _parts: list[TokenRows] = field(default_factory=list)  # of the current step
    _lost: list[slice | Tensor] = field(default_factory=list)  # rows of failed requests
    _more: bool = False  # a layer of the model will read the keys of the last one
    attended: bool = True
    serials: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def begin(self, steps: Mapping[int, RequestStep], gone: Iterable[str]) -> None:
        """Begin a step, and free the requests that ended or restart.

        Args:
            steps: the requests of the step, by their keys in the engine's tensors.
            gone: requests that finished, were cancelled or preempted.
        """
        self._steps, self._parts, self._lost, self._more = steps, [], [], False
        self.attended = not steps
        again = (step.request for step in steps.values() if step.computed == 0)
        self._drop({*gone, *again})
        self.serials |= {step.request: step.serial for step in steps.values()}

    def compress(self) -> set[str]:
        """Compress the decoding requests as far as the policy allows; return their names."""
        found: set[str] = set()
        if self.decoding is not None and self.decoding.batch is not None:
            try:
                room = self.decoding.batch.a_page_each
                found = {self.names[i] for i in self.decoding.compress(room)}
            except Exception as error:
                self._fail(self.decoding, error)
            self._expel()
        return found

    def rename(self, ids: Int[Tensor, " P1"]) -> None:
        """Replace page id i by ids[i], after `PagePool.withdraw` moved pages between steps."""
        decoding = () if self.decoding is None else (self.decoding,)
        for cache in (*self.prefills.values(), *decoding):
            if cache.batch is not None:
                cache.batch.rename(ids)

    def attend(
        self,
        layer: int,
        rows: RequestRows,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
        softcap: float | None = None,
        sinks: Float[Tensor, " Q"] | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Store the step's tokens in one layer and attend to them; layers are called in order.

        Rows of failed requests are set to zero. `softcap` is the bound of the layer's logits, and
        `sinks` a logit of each query head, as for `kv_attention.attend`. With `more`, a further
        layer of the model will attend to the same keys and values, as in `PolicyCache.attend`.
        """
        if layer == 0 and not self._more:
            self._open(rows)
        self._more = more
        whole = self._parts
        for part in whole:
            try:
                part.attend(layer, query, key, value, self.scale, output, softcap, sinks, more=more)
            except Exception as error:
                self._lose(part, error)
        if layer == self.empty.shape.layers - 1 and not more:
            self._close()
        for row in self._lost:
            output[row] = 0

    def held(self, *, kept: bool) -> dict[str, RequestHeld]:
        """Return the pages and tokens of every request that holds pages.

        Args:
            kept: whether to count kept tokens too.
        """
        return self.counted(kept=kept).read()

    def counted(self, *, kept: bool) -> HeldCopy:
        """Begin to count what `held` returns; the host does not wait for the device."""
        caches = [([name], cache) for name, cache in self.prefills.items()]
        if self.decoding is not None:
            caches.append((self.names, self.decoding))
        held = [(names, cache.batch) for names, cache in caches if cache.batch is not None]
        numbers = [held_numbers(batch, kept=kept) for _, batch in held]
        return HeldCopy.of([name for names, _ in held for name in names], numbers)

    def _open(self, rows: RequestRows) -> None:
        counts = [end - begin for begin, end in pairwise(rows.start)]
        if dict(zip(rows.key, counts, strict=True)) != {
            k: s.tokens for k, s in self._steps.items()
        }:
            raise RuntimeError(
                f"a step has rows of the requests {dict(zip(rows.key, counts, strict=True))}, by "
                f"key and tokens, but began with {dict(self._steps)}"
            )
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
            assert self.decoding is not None, "a decoding request has been prefilled"
            row = [found.get(name, -1) for name in self.names]
            part = TokenRows.one_each(self.decoding, row, self.empty.device)
            self._begin(part, prompt=False, more=False)

    def _prefill(self, step: RequestStep, begin: int, end: int) -> None:
        """Begin the forward pass of a prompt or of a chunk."""
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
        """Join requests with a finished prefill to the decoding ones."""
        self.attended = True
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
        """Fail the requests of a part, in any layer."""
        self._parts = [each for each in self._parts if each is not part]
        self._lost.append(part.target)
        self._fail(part.cache, error)

    def _fail(self, cache: PolicyCache, error: Exception) -> None:
        """Fail the requests of a cache, and free their pages."""
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is unusable
        names = self.names if cache is self.decoding else []
        for name in [*names, *(name for name, each in self.prefills.items() if each is cache)]:
            self._note(name, error)
        cache.release()
        if cache is self.decoding:
            self.decoding, self.names = None, []
        self.prefills = {name: each for name, each in self.prefills.items() if each is not cache}

    def _expel(self) -> None:
        """Fail the decoding requests for which a policy raised."""
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
        """Free decoding requests."""
        kept = [i for i, name in enumerate(self.names) if name not in gone]
        if self.decoding is None or len(kept) == len(self.names):
            return
        self.names = [self.names[i] for i in kept]
        if kept:
            self.decoding.select(torch.tensor(kept))
        else:
            self.decoding.release()
            self.decoding = None
