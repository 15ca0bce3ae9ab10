"""A compressed cache for all layers of a model, independent of the host that runs it.

Per forward pass the host calls `begin` once and `attend` for every layer in order. Attention reads
stored pages in place, the raw window, and the fresh tokens; then the fresh tokens are stored as the
policy says. Nothing keeps an uncompressed copy of what is stored.
"""

from collections.abc import Sequence
from copy import copy, deepcopy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended
from kv_paging import PagePool, page_kernels_of
from kv_policy import Budget, CacheShape, KVPolicy, Observe, Queries, complete
from kv_runtime import checks
from kv_runtime.attention import attended
from kv_runtime.backends import AUTO, backend_for
from kv_runtime.bases import Bases, Folded
from kv_runtime.batch import Batch, rolls_back
from kv_runtime.forward_pass import Forward, Pass
from kv_runtime.layout import Layout
from kv_runtime.memory import MemoryReport
from kv_runtime.retain.keep_all import KeepAll
from kv_runtime.retain.selected import KeepSelected
from kv_runtime.stats import Tally


class PolicyCache:
    """The cache of one batch under one policy."""

    def __init__(
        self,
        policy: KVPolicy,
        shape: CacheShape,
        *,
        pages: int | None = None,
        page_tokens: int = 16,
        budgets: Sequence[Budget | None] | None = None,
        device: torch.device | str = "cpu",
        backend: str = AUTO,
        folded: Folded = frozenset(),
        pool: PagePool | None = None,
        tally: Tally | None = None,
        careful: bool = False,
    ) -> None:
        """Check what is asked; memory is taken when the first tokens arrive.

        Args:
            policy: what to keep and how.
            shape: the model's cache, or a shard of its heads.
            pages: size of a fixed pool; None lets the pool grow as needed.
            page_tokens: tokens of the first tier in a page.
            budgets: a budget per sequence of the batch, None for the policy's own.
            device: where the cache lives.
            backend: who attends, and who writes and reads pages; `auto` is the fastest here.
            folded: what comes as coordinates in the policy's basis, because it is folded into the
                model's weights; with values the output is given in coordinates too.
            pool: pages that are shared with other caches; raw windows lie there, too.
            tally: where plans are counted; caches may share one.
            careful: a selector that fails about one sequence of several does not keep the others
                from going on; `failures` says about which.

        Raises:
            ValueError: the policy asks for something this cache cannot do, a budget is below what
                the policy protects, a size is not positive, or the backend cannot be used here.
        """
        if pages is not None and pages < 1:
            raise ValueError(f"a pool of {pages} pages holds nothing; give 1 or more, or None")
        checks.check_reads(policy, shape)
        self.policy, self.shape = policy, shape
        self.selector = None if policy.selector is None else complete(policy.selector)
        self.device, self._pages, self._pool = torch.device(device), pages, pool
        self.tally = tally or Tally()
        self._careful = careful
        self.backend = backend_for(device, backend)
        self.bases = (
            None if policy.basis is None else Bases.of(policy.basis, shape, self.device, folded)
        )
        self.layout = Layout.of(policy, shape, self.bases, page_tokens)
        self._budgets = tuple(budgets) if budgets is not None else None
        checks.check_budgets(policy, self._budgets)
        self._followers: tuple[PolicyCache, ...] = ()  # empty caches that keep the next pass too
        self.reset()

    def share_prefill(self, others: "Sequence[PolicyCache]") -> None:
        """Let empty caches store the next pass of this empty one too, as if they had run it.

        Over an empty cache a prompt attends to itself alone, so attention depends on the basis of a
        policy and on nothing else of it.

        Args:
            others: caches of the same shape and of equal bases.

        Raises:
            ValueError: a cache holds tokens, or its basis is another.
        """
        for cache in (self, *others):
            if cache.batch is not None:
                raise ValueError("a cache that holds tokens can share no prefill; reset it first")
            mine, its = self.bases, cache.bases
            if not (mine is its if mine is None or its is None else mine.same_as(its)):
                raise ValueError(
                    f"{cache.policy} stores vectors in another basis than {self.policy}, so they "
                    "can share no prefill"
                )
        self._followers = tuple(others)

    def another(self, budget: Budget | None = None) -> "PolicyCache":
        """Make an empty cache like this one, with the same bases and pool, but for the budget."""
        made = copy(self)
        made._followers, made._budgets = (), None if budget is None else (budget,)
        checks.check_budgets(self.policy, made._budgets)
        made.reset()
        return made

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.batch: Batch | None = None
        self._keeper: KeepAll | KeepSelected = KeepAll()
        self._pass: Forward | None = None
        self._next_layer = 0
        self._goes_on = False  # prompts, in a later pass

    @property
    def columns(self) -> int:
        """Columns of the batch so far, padding included."""
        return self.batch.columns if self.batch is not None else 0

    @property
    def sequences(self) -> int | None:
        """Sequences held, or None before the first pass."""
        return len(self.batch.seen) if self.batch is not None else None

    def begin(
        self, valid: Bool[Tensor, "B L"], *, prompt: bool | None = None, more: bool = False
    ) -> None:
        """Start a pass over new columns; `valid` is False where a column is padding.

        Args:
            valid: which columns hold a token.
            prompt: whether the tokens are of prompts; None: each sequence reads a prompt unless it
                had tokens before and brings a single one.
            more: the prompts go on in a later pass, so every token stays until then.

        Raises:
            ValueError: no columns, or another batch size than before.
            RuntimeError: the pass before this one did not finish.
            kv_paging.PoolExhausted: a fixed pool is too small; the cache is as it was.
        """
        self._expect_no_pass()
        sequences, columns = valid.shape
        checks.check_goes_on(self.batch, sequences, columns)
        batch = self.batch or self._allocate(sequences)
        now = Forward.of(valid, batch.seen, started=batch.started, prompt=prompt, more=more)
        self._begin(batch, now)
        for follower in self._followers:
            follower._begin(follower.batch or follower._allocate(sequences), now)

    def _begin(self, batch: Batch, now: Forward) -> None:
        self._keeper.prepare(batch, now)
        self.batch, self._pass, self._next_layer = batch, now, 0
        self._goes_on = now.whole.is_partial_prefill

    def _allocate(self, sequences: int) -> Batch:
        budgets = checks.shared_out(self._budgets, sequences)
        selector = self.selector
        self._keeper = (
            KeepAll()
            if selector is None
            else KeepSelected(selector, budgets, self.tally, careful=self._careful)
        )
        kernels = page_kernels_of(self.backend)
        return Batch.allocate(
            self.policy,
            self.layout,
            sequences,
            self._pages,
            self.device,
            kernels,
            pool=self._pool,
            window_in_pages=self._pool is not None,
        )

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B H G L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
    ) -> Float[Tensor, "B Hv Gv L Dv"]:
        """Attend over everything the layer holds and the fresh tokens, then store those.

        Values and the output are by KV head, or by stored head where values come as coordinates.

        Raises:
            RuntimeError: `begin` was not called, or layers come out of order.
            kv_paging.PoolExhausted: a fixed pool has no room for the fresh tokens.
        """
        now, batch = self._expect(layer)
        value_dim = value.shape[-1]
        if self.bases is not None:
            query = self.bases.queries(layer, query)
            key, value = self.bases.keys(layer, key), self.bases.values(layer, value)
        observe = self.observe
        others = tuple({f.observe for f in self._followers} - {observe})
        fresh = (query, key, value)
        watch = (observe, *others)
        result = attended(batch, now.whole, layer, fresh, scale, watch, self.backend)
        observed = dict(zip(watch, (result, *result.others), strict=True))
        queries = self._queries(query, now.whole, scale)
        self.keep(layer, key, value, result, queries)
        for follower in self._followers:
            follower.keep(layer, key, value, observed[follower.observe], queries)
        if self._pass is None:
            self._followers = ()
        return result.out if self.bases is None else self.bases.undone(layer, result.out, value_dim)

    def _queries(self, query: Float[Tensor, "B H G L D"], now: Pass, scale: float) -> Queries:
        """The queries of a pass as selectors see them: q·k / sqrt(D) is the logit."""
        readers = (self, *self._followers)
        selectors = [reader.selector for reader in readers]
        factor = scale * query.shape[-1] ** 0.5
        read = any(each is not None and "queries" in each.reads for each in selectors)
        return Queries(query * factor if read and factor != 1 else query, now.position)

    @property
    def observe(self) -> Observe:
        """What the pass that has begun has to observe."""
        if self._pass is not None and self._pass.whole.is_prefill:
            return self._keeper.observe_prompt
        return self._keeper.observe_step

    def keep(
        self,
        layer: int,
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B H L Dv"],
        result: Attended,
        queries: Queries | None = None,
    ) -> None:
        """Store a layer's fresh tokens, given what attention over the layer observed.

        `attend` does this itself. Several empty caches of the same basis may share the attention of
        one prompt, which does not depend on them: one attends, and the others keep what was
        observed for them of the fresh tokens, which is the last entry of `result`. Keys and values
        are as they are stored: coordinates, if the policy has a basis.

        Raises:
            RuntimeError: `begin` was not called, or layers come out of order.
            kv_paging.PoolExhausted: a fixed pool has no room for the fresh tokens.
        """
        now, batch = self._expect(layer)
        keeper = self._keeper
        for part in now.parts:
            fresh = part.vectors(key), part.vectors(value)
            seen = part.observed(result), part.queries(queries)
            keeper.take(batch, part.now, layer, *fresh, *seen)
        self._next_layer += 1
        if self._next_layer == self.shape.layers:
            # Prompts were scored among what was stored then, so they are settled first.
            for part in reversed(now.parts):
                keeper.finish(batch, part.now)
            batch.end(now.whole)
            self._pass = None
            keeper.after(batch)

    def _expect(self, layer: int) -> tuple[Forward, Batch]:
        now, batch = self._pass, self.batch
        if now is None or batch is None or layer != self._next_layer:
            expected = "a call of begin()" if now is None else f"layer {self._next_layer}"
            raise RuntimeError(f"layer {layer} attends where {expected} was expected")
        return now, batch

    def join(self, other: "PolicyCache") -> None:
        """Let the sequences of another cache over the same pool follow mine; it is left empty.

        Raises:
            ValueError: the two differ in what they store or where, or some prompt has not ended;
                nothing has changed.
        """
        if self.batch is None or other.batch is None:
            raise ValueError("a cache that holds nothing cannot be joined with another")
        if self._goes_on or other._goes_on:
            raise ValueError("a batch whose prompts have not ended cannot be joined")
        self.batch.join(other.batch)  # refuses before anything has changed
        mine, theirs = self._keeper, other._keeper
        if isinstance(mine, KeepSelected) and isinstance(theirs, KeepSelected):
            mine.join(theirs)
        other.reset()

    def failures(self) -> dict[int, Exception]:
        """Give, once, the sequences that the selector failed about, if the cache is careful."""
        return self._keeper.failures() if isinstance(self._keeper, KeepSelected) else {}

    def release(self) -> None:
        """Forget everything and give all pages back to the pool, which others may share."""
        if self.batch is not None:
            self.batch.release()
        self.reset()

    def compress(self, pages: int | None = None) -> list[int]:
        """Plan sequences now, as the policy does when pages are short.

        Args:
            pages: to free, about, by few sequences, the oldest plan first; where all together
                would not free so many, none is planned. None: all above their budgets are planned.

        Returns:
            The sequences that were planned; none if the policy never does, see `Replan.short`.
        """
        return [] if self.batch is None else self._keeper.compress(self.batch, pages)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Sequences become source[0], source[1], ...: beams, repeats, subsets."""
        if self.batch is not None:
            source = source.to(self.device)
            self.batch.select(source)
            self._keeper.select(source)

    @property
    def held_columns(self) -> Bool[Tensor, "B T"] | None:
        """Which columns seen hold a token; None: nothing is held, or the pool is shared."""
        record = None if self.batch is None else self.batch.record
        return None if record is None or not record.count else record.held

    @property
    def rolls_back(self) -> bool:
        """Whether the newest columns can be taken back."""
        return self._pool is None and rolls_back(self.policy)

    def roll_back(self, columns: int) -> None:
        """Take the newest `columns` columns back, with the tokens that sequences have in them.

        Raises:
            RuntimeError: a pass has begun and not ended.
            ValueError: the policy cannot, the pool is shared, or there are not that many columns.
        """
        self._expect_no_pass()
        if not self.rolls_back:
            raise ValueError(
                f"{self.policy} cannot take tokens back; use a policy that keeps every token and "
                "has no raw window, such as k8v4"
            )
        if columns and self.batch is None:
            raise ValueError(f"{columns} columns cannot be taken back: the cache holds none")
        if columns and self.batch is not None:
            self.batch.take_back(columns)

    def __deepcopy__(self, memo: dict[int, object]) -> "PolicyCache":
        """Copy what is held, into a pool of its own that is as large; policy and bases are shared.

        Raises:
            RuntimeError: a pass has begun and not ended.
            ValueError: the pool is shared with other caches.
        """
        self._expect_no_pass()
        if self._pool is not None:
            raise ValueError(
                "a cache over a pool that others share cannot be copied; read the prompt again, "
                "or use select() to repeat its sequences"
            )
        made = copy(self)
        made._followers = ()
        shared = [self.policy, self.shape, self.layout, self.bases]
        if isinstance(self._keeper, KeepSelected):
            shared.append(self._keeper.selector)
        if self.batch is not None:
            shared += self.batch.unchanging
        memo |= {id(self): made} | {id(x): x for x in shared if x is not None}
        # As what passes store, a copy outlives the inference mode it may be made in.
        with torch.inference_mode(False), torch.no_grad():
            made.tally = deepcopy(self.tally, memo)
            made.batch, made._keeper = deepcopy((self.batch, self._keeper), memo)
        return made

    def _expect_no_pass(self) -> None:
        if self._pass is not None:
            checks.refuse_unfinished(self._next_layer, self.shape.layers)

    def memory(self) -> MemoryReport:
        """Count what is held, by name."""
        basis = 0 if self.bases is None else self.bases.nbytes
        if self.batch is None:
            return MemoryReport.empty(self.layout, basis)
        return self.batch.memory(self.shape.token_bytes, basis)
