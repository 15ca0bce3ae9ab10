"""The requests of an engine over one page pool: separate prefill, batched decode."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kv_paging import PoolExhausted
from kv_policy import Budget
from kv_runtime.cache import PolicyCache
from kv_runtime.drafted_rows import DraftedRows, store_drafts
from kv_runtime.fixed_rows import FixedRows
from kv_runtime.measure import HeldCopy, RequestHeld, held_numbers
from kv_runtime.pending import PendingTokens, TokenVectors
from kv_runtime.prefixes import StoredPrefixes, appends_only
from kv_runtime.token_rows import TokenRows

NOTHING: Final[Mapping[str, int]] = MappingProxyType({})
Part: TypeAlias = TokenRows | FixedRows | DraftedRows


@dataclass(frozen=True, slots=True)
class RequestStep:
    """One request in an engine's step."""

    request: str
    computed: int  # tokens computed before the step
    tokens: int  # in the step
    prompt: int  # tokens of the prefill, including generated ones after a preemption
    budget: Budget | None = None  # overrides the policy's budget
    serial: int = 0  # unique number of this start of the request
    refused: str | None = None  # why the request cannot be served; it fails with this message
    base: int | None = None  # a stored prefix that the request continues, in its first step
    boundary: int | None = None  # tokens that are compressed before later ones are read
    keep: int | None = None  # the number under which the state after the step is stored
    drafts: int = 0  # the last of the step's tokens that may be wrong; a later step tells

    @property
    def starts(self) -> bool:
        """Whether the request starts, also after a preemption."""
        return self.computed == 0 or self.base is not None

    @property
    def known(self) -> int:
        """The step's tokens that are no drafts."""
        return self.tokens - self.drafts

    @property
    def is_prefill(self) -> bool:
        """Whether the step's tokens belong to the prompt."""
        return self.computed < self.prompt

    @property
    def remaining(self) -> int:
        """Tokens that later steps read before they are compressed with those of the step."""
        reached, stop = self.computed + self.known, self.prompt
        if self.boundary is not None and self.computed < self.boundary:
            stop = min(stop, self.boundary)
        return max(0, stop - reached)

    @property
    def is_partial_prefill(self) -> bool:
        """Whether a later step reads more tokens before they are compressed."""
        return self.remaining > 0

    @property
    def ends_prefill(self) -> bool:
        """Whether the whole prompt has been read after the step."""
        return self.is_prefill and self.computed + self.known >= self.prompt


@dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of each request in a step's tensors."""

    key: tuple[int, ...]  # each request's key in `RequestBatch.begin`
    start: tuple[int, ...]  # each request's first row, then the number of rows
    captured: bool = False  # of no request: a forward pass of decoding requests is captured

    @property
    def tokens(self) -> dict[int, int]:
        """The rows of each request, by its key."""
        counts = (end - begin for begin, end in pairwise(self.start))
        return dict(zip(self.key, counts, strict=True))


@dataclass(slots=True)
class RequestBatch:
    """The caches of all requests of a worker: one per prefill, and one for all decoding requests.

    A step calls `begin` once, `open` if its rows are known before the forward pass, `attend` for
    every layer in order, and `end`; then it reads `held` and `failed`. An error in one request, for
    example in a policy, ends only that request.

    A step may verify drafts of requests. Their caches hold none of them until a later step of the
    request continues after those that were right: `confirm` stores these, at the latest in `open`.

    After `fix` a forward pass of decoding requests may be captured: `capture` in place of `attend`.
    Where it is launched again, a step calls `begin`, `open` and `end` alone.

    Attributes:
        empty: a cache without sequences, over the shared pool.
        scale: the scale of attention logits.
        tell: called with the request and the error when a request fails.
        prefills: caches of requests with an unfinished prompt.
        decoding: the cache of all other requests; None: no request decodes.
        names: the requests of the sequences of `decoding`; "" where one is of no request.
        serials: serials of all current requests.
        attended: whether the tokens of the step went through all layers, or there are none.
        failed: serials of failed requests that have not been freed.
        prefixes: states of requests at boundaries.
        pending: drafts of decoding requests, by name.
        replayed: whether a captured step was launched in place of the layers, as far as the host
            knows: none has attended, and all could.
    """

    empty: PolicyCache
    scale: float
    tell: Callable[[str, Exception], None]
    prefills: dict[str, PolicyCache] = field(default_factory=dict)
    decoding: PolicyCache | None = None
    names: list[str] = field(default_factory=list)
    _steps: Mapping[int, RequestStep] = field(default_factory=dict)  # of the current step
    _parts: list[Part] = field(default_factory=list)  # of the current step
    _lost: list[slice | Tensor | int] = field(default_factory=list)  # rows of failed requests
    _more: bool = False  # a layer of the model will read the keys of the last one
    attended: bool = True
    serials: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    prefixes: StoredPrefixes = field(default_factory=StoredPrefixes)
    pending: dict[str, PendingTokens] = field(default_factory=dict)
    replayed: bool = False
    _fixed: FixedRows | None = None  # None: the memory of decoding requests changes its place
    _opened: bool = False  # the rows of the current step are known
    _begun: bool = False  # a layer has attended in the current step
    _stepped: bool = False  # requests decode in the current step
    _right: dict[str, Sequence[TokenVectors]] = field(default_factory=dict)  # while confirming

    def begin(
        self,
        steps: Mapping[int, RequestStep],
        gone: Iterable[str],
        kept: Mapping[str, int] = NOTHING,
        dropped: Collection[int] = (),
        reached: Mapping[str, int] = NOTHING,
    ) -> None:
        """Begin a step, and free the requests that ended or restart.

        Args:
            steps: the requests of the step, by their keys in the engine's tensors.
            gone: requests that finished, were cancelled or preempted.
            kept: numbers under which the states of requests that finished are stored.
            dropped: prefixes to release.
            reached: tokens of requests in `kept`, which tell what is right of their drafts.
        """
        self.confirm(reached)
        for name, number in kept.items():
            if name in self.names and name not in self.failed:
                assert self.decoding is not None, "it has the sequences of these names"
                self.prefixes.move(number, self.decoding, self.names.index(name))
        self.prefixes.drop(dropped)
        self._steps, self._parts, self._lost, self._more = steps, [], [], False
        self._opened = self._begun = self._stepped = self.replayed = False
        self.attended = not steps
        again = (step.request for step in steps.values() if step.starts)
        self._drop({*gone, *kept, *again})
        self.serials |= {step.request: step.serial for step in steps.values()}
        self.pending = {name: x for name, x in self.pending.items() if name in self.names}

    def confirm(self, reached: Mapping[str, int] | None = None) -> None:
        """Store the drafts that were right, and drop the others.

        Args:
            reached: tokens of requests that are right; None: those of the current step.
        """
        if reached is None:
            reached = {each.request: each.computed for each in self._steps.values()}
        for name in reached.keys() & self.pending.keys():
            pending = self.pending.pop(name)
            if name not in self.names:
                continue
            try:
                right = pending.right(reached[name])
            except ValueError as error:
                self._note(name, error)
                self._let_go({name})
                continue
            if right:
                self._right[name] = right
        if not self._right:
            return
        while self._right and self.decoding is not None:
            self._confirm_one_each(self.decoding)
        self._right = {}
        self._expel()

    def _confirm_one_each(self, cache: PolicyCache) -> None:
        """Store the first draft of each request that has some left."""
        some = next(iter(self._right.values()))[0]
        each = [self._right.get(name, (some,))[0] for name in self.names]
        valid = torch.tensor([[name in self._right] for name in self.names])
        self._right = {name: rest for name, (_, *rest) in self._right.items() if rest}
        try:
            store_drafts(cache, valid.to(self.empty.device), TokenVectors.joined(each))
        except Exception as error:
            self._fail(cache, error)

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
        for cache in (*self.prefills.values(), *decoding, *self.prefixes.caches.values()):
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
            self.open(rows)
            self._begun = True
            for part in self._parts:
                if isinstance(part, FixedRows):
                    self._attempt(part, part.begin)
        self._more = more
        given = layer, query, key, value, self.scale, output, softcap, sinks
        for part in self._parts:
            self._attempt(part, partial(part.attend, *given, more=more))
        if layer == self.empty.shape.layers - 1 and not more:
            self.attended = True
        for row in self._lost:
            output[row] = 0

    def open(self, rows: RequestRows) -> None:
        """Open the rows of the step, once, and reserve what its forward pass needs.

        Raises:
            RuntimeError: the step did not begin with these requests.
        """
        if not self._opened:
            self._opened = True
            self.confirm()
            self._open(rows)

    def are_of_step(self, rows: RequestRows) -> bool:
        """Whether the step began with the requests of these rows."""
        return rows.tokens == {key: step.tokens for key, step in self._steps.items()}

    def end(self) -> None:
        """End the step after its forward pass: plan what is due, and let read prompts decode.

        A forward pass of decoding requests that no layer has attended in was launched as a graph.
        """
        self.replayed = not self._begun and not self.attended and self._replays
        if not (self.attended or self.replayed):
            return
        self.attended = True
        if self._stepped and self.decoding is not None:
            try:
                self.decoding.count()
            except Exception as error:
                self._fail(self.decoding, error)
        self._note_drafts()
        self._stepped = False
        self._expel()
        self._keep()
        self._let_decode()

    def _note_drafts(self) -> None:
        """Keep the drafts of the step until a later one tells how many are right."""
        known = {x.request: x.computed + x.known for x in self._steps.values()}
        for part in self._parts:
            if isinstance(part, DraftedRows):
                self.pending |= part.pending(self.names, known)

    def fix(self, requests: int, tokens: int) -> None:
        """Let decoding requests have memory of fixed addresses; called before each `capture`.

        The first call allocates it, before there are requests. The others only end the last step.

        Args:
            requests: the most requests.
            tokens: the most tokens of a request.

        Raises:
            ValueError: requests decode already.
        """
        if self._fixed is not None:
            self._fixed.fill([-1] * len(self.names))
            return
        if self.decoding is not None:
            raise ValueError("requests decode already; fix their memory before the first")
        self.decoding = self.empty.another()
        self.decoding.fix(requests, tokens)
        self.names = [""] * requests
        self._fixed = FixedRows.of(self.decoding, requests)

    def capture(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        output: Float[Tensor, "m Q Dv"],
        softcap: float | None = None,
        sinks: Float[Tensor, " Q"] | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Launch, between steps, what `attend` launches for m tokens of requests that decode.

        Nothing is stored, as all tokens are padding. Launched again in a step, after `open`, it
        does what the step's `attend` would. Layers are called in order.

        Raises:
            ValueError: there are more tokens than requests have memory, or none has.
        """
        rows = self._fixed
        if rows is None or len(query) > len(self.names):
            raise ValueError(
                f"a step of {len(query)} tokens is captured, and memory is fixed for "
                f"{0 if rows is None else len(self.names)} requests"
            )
        if layer == 0 and not self._more:
            rows.cache.take_any_length()
            rows.begin()
        self._more = more
        rows.attend(layer, query, key, value, self.scale, output, softcap, sinks, more=more)

    @property
    def _replays(self) -> bool:
        """Whether all tokens of the step are of requests that decode, over fixed memory."""
        steps = self._steps.values()
        one_each = all(step.tokens == 1 and not step.is_prefill for step in steps)
        return self._opened and self._fixed is not None and one_each

    def _attempt(self, part: Part, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._lose(part, error)

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
        if not self.are_of_step(rows):
            raise RuntimeError(
                f"a step has rows of the requests {rows.tokens}, by key and tokens, but began with "
                f"{dict(self._steps)}"
            )
        found: dict[str, int] = {}
        drafts: dict[str, int] = {}
        for i, key in enumerate(rows.key):
            step, begin, end = self._steps[key], rows.start[i], rows.start[i + 1]
            if step.request in self.failed:
                self._lost.append(slice(begin, end))
            elif step.is_prefill or step.refused:
                self._prefill(step, begin, end - step.drafts)
                if step.drafts:  # an engine pads its step with them, and drops what follows
                    self._lost.append(slice(end - step.drafts, end))
            else:
                found[step.request], drafts[step.request] = begin, step.drafts
        assert found.keys() <= {*self.names}, "a decoding request has been prefilled"
        if self._fixed is not None:
            self._prepare(self._fixed, found)
        row = [found.get(name, -1) for name in self.names]
        self._stepped = any(each >= 0 for each in row)
        if self._stepped:
            assert self.decoding is not None, "it has the sequences of these names"
            if self._fixed is not None and self._replays:
                self._parts = [*self._parts, self._fixed]
                return
            if any(drafts.values()):
                self._verify(self.decoding, row, [drafts.get(name, 0) for name in self.names])
                return
            part = TokenRows.one_each(self.decoding, self._in_order(row), self.empty.device)
            self._begin(part, prompt=False)

    def _in_order(self, row: list[int]) -> list[int]:
        """Return the rows of the decoding requests, whose order becomes that of adjacent rows.

        An engine reorders its rows as requests end, and attention reads and writes adjacent rows in
        place.
        """
        order = sorted(range(len(row)), key=row.__getitem__)
        found = [row[i] for i in order]
        adjacent = found[0] >= 0 and found == list(range(found[0], found[-1] + 1))
        if found == row or not adjacent or self._fixed is not None:
            return row
        assert self.decoding is not None  # it has the sequences of these rows
        self.decoding.select(torch.tensor(order))
        self.names = [self.names[i] for i in order]
        return found

    def _verify(self, cache: PolicyCache, row: Sequence[int], drafts: Sequence[int]) -> None:
        """Begin the forward pass of decoding requests with drafts.

        Raises:
            RuntimeError: they have memory of fixed addresses.
        """
        if self._fixed is not None:
            raise RuntimeError(
                "a step has drafts, but decode steps are captured in graphs, of one token per "
                "request; please report this with the engine's version and options"
            )
        part = DraftedRows.of(cache, row, drafts, self.empty.device)
        self._parts = [*self._parts, part]
        self._attempt(part, part.begin)

    def _prepare(self, rows: FixedRows, found: Mapping[str, int]) -> None:
        """Fill the rows of decoding requests, and reserve the pages of their step."""

        def fill() -> None:
            rows.fill([found.get(name, -1) for name in self.names])

        fill()
        if not found:
            return
        try:
            try:
                rows.cache.prepare(rows.row)
            except PoolExhausted:
                if not self.compress():
                    raise
                fill()  # a policy may have raised for some
                rows.cache.prepare(rows.row)
        except Exception as error:
            self._fail(rows.cache, error)
            fill()
        left = {*self.names}
        self._lost += [row for name, row in found.items() if name not in left]

    def _prefill(self, step: RequestStep, begin: int, end: int) -> None:
        """Begin the forward pass of a prompt or of a chunk."""
        try:
            if step.refused is not None:
                raise ValueError(step.refused)
            if step.base is not None:
                self.prefills[step.request] = made = self.prefixes.begin(step.base)
                self._count_prefix_pages(made, planned=False)
            elif step.starts:
                self.prefills[step.request] = self.empty.another(step.budget)
            cache = self.prefills[step.request]
        except Exception as error:
            self._note(step.request, error)
            self._lost.append(slice(begin, end))
            self._let_go({step.request})
            return
        part = TokenRows.of(cache, torch.arange(begin, end)[None], self.empty.device)
        self._begin(part, prompt=True, remaining=step.remaining)

    def _begin(self, part: TokenRows, *, prompt: bool, remaining: int = 0) -> None:
        self._parts = [*self._parts, part]
        self._attempt(part, partial(part.begin, prompt=prompt, remaining=remaining))

    def _keep(self) -> None:
        """Store the states of requests at their boundaries."""
        for step in self._steps.values():
            cache = self.prefills.get(step.request)
            if step.keep is None or cache is None:
                continue
            with suppress(PoolExhausted):  # the request does not depend on it
                self.prefixes.store(step.keep, cache)
                self._count_prefix_pages(cache, planned=False)

    def _count_prefix_pages(self, cache: PolicyCache, *, planned: bool) -> None:
        """Count the pages that prefixes hold, too, once the policy leaves them as they are."""
        if cache.batch is not None and appends_only(cache.policy, planned=planned):
            cache.batch.count_prefix_pages()

    def _let_decode(self) -> None:
        """Join requests with a finished prefill to the decoding ones."""
        for step in self._steps.values():
            if step.ends_prefill and step.request in self.prefills:
                cache = self.prefills.pop(step.request)
                self._count_prefix_pages(cache, planned=True)
                if self._fixed is not None:
                    place = self.names.index("")
                    self._fixed.cache.adopt(place, cache)
                    self.names[place] = step.request
                    continue
                self.names.append(step.request)
                if self.decoding is None:
                    self.decoding = cache
                else:
                    self.decoding.join(cache)

    def _lose(self, part: Part, error: Exception) -> None:
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
            if name:
                self._note(name, error)
        if cache is self.decoding and self._fixed is not None:
            self._vacate({name for name in names if name})
            return
        cache.release()
        if cache is self.decoding:
            self.decoding, self.names = None, []
        self.prefills = {name: each for name, each in self.prefills.items() if each is not cache}

    def _expel(self) -> None:
        """Fail the decoding requests for which a policy raised."""
        errors = {} if self.decoding is None else self.decoding.failures()
        errors = {i: error for i, error in errors.items() if self.names[i]}
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
        if self._fixed is not None:
            if not {*gone}.isdisjoint(self.names):
                self._vacate(gone)
            return
        kept = [i for i, name in enumerate(self.names) if name not in gone]
        if self.decoding is None or len(kept) == len(self.names):
            return
        self.names = [self.names[i] for i in kept]
        if kept:
            self.decoding.select(torch.tensor(kept))
        else:
            self.decoding.release()
            self.decoding = None

    def _vacate(self, gone: Collection[str]) -> None:
        """Free decoding requests with fixed memory."""
        assert self._fixed is not None, "memory is fixed"
        self._fixed.cache.clear([i for i, name in enumerate(self.names) if name and name in gone])
        self.names = ["" if name in gone else name for name in self.names]
