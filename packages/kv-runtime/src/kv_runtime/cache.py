"""A compressed cache for all layers of a model, independent of the engine that runs it.

Per forward pass the engine calls `begin` once and `attend` for every layer in order. Attention
reads stored pages in place, the raw window and the new tokens; then the new tokens are stored by
the policy. No uncompressed copy of stored tokens is kept.
"""

from collections.abc import Collection, Sequence
from copy import copy, deepcopy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_attention import Attended, RowInputs, check_softmax, load_rows
from kv_paging import PagePool, page_kernels_of
from kv_policy import (
    Budget,
    CacheShape,
    KVPolicy,
    Observe,
    Queries,
    Replay,
    complete,
)
from kv_runtime import checks
from kv_runtime.attention import attended, pages_read
from kv_runtime.backends import AUTO, checked_backend
from kv_runtime.bases import Bases, Folded, by_stored_head
from kv_runtime.batch import Batch, rolls_back
from kv_runtime.copies import to_device
from kv_runtime.expanded import Expanded, attended_by_head, observes_tail
from kv_runtime.forward_pass import Forward, Pass, queries_of
from kv_runtime.grouped_rows import attend_grouped
from kv_runtime.joined import checked_states
from kv_runtime.layout import Layout
from kv_runtime.memory import MemoryReport
from kv_runtime.replay import ReplayChunk, Rereading, WaitingPrompts
from kv_runtime.retain.keep_all import KeepAll
from kv_runtime.retain.selected import KeepSelected
from kv_runtime.row_pass import RowPass
from kv_runtime.saved import (
    CacheFacts,
    CacheState,
    facts_of,
    fill,
    plans_of,
    tensors_of,
)
from kv_runtime.shared_layer import SharedLayer
from kv_runtime.stats import Tally
from kv_runtime.verified import Verified


class PolicyCache:
    """The cache of one batch and one policy."""

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
        replays: bool = False,
    ) -> None:
        """Check the arguments; memory is allocated when the first tokens arrive.

        Args:
            policy: the policy.
            shape: the shape of the model's cache, or of a shard of its heads.
            pages: size of a fixed pool; None: the pool grows as needed.
            page_tokens: tokens of the first tier per page.
            budgets: a budget per sequence of the batch, None for the policy's own.
            device: the device of the cache.
            backend: the backend of attention and page kernels; `auto`: the fastest available.
            folded: vectors already projected into the basis, because it is folded into the model's
                weights; if values are, so is the output.
            pool: a page pool shared with other caches; raw windows are in it, too.
            tally: counts plans; caches may share one.
            careful: whether a selector's error is isolated to the sequence that causes it, and
                returned by `failures`.
            replays: whether the engine runs the model again over each prompt of a policy that asks
                for it; see `waiting`.

        Raises:
            ValueError: the policy needs something this cache does not support, a budget is below
                the policy's protected tokens, a size is not positive, or the backend is missing.
        """
        if pages is not None and pages < 1:
            raise ValueError(f"pages is {pages}; give 1 or more, or None")
        self.policy, self.shape = policy, shape
        self.selector = None if policy.selector is None else complete(policy.selector)
        self.device, self._pages, self._pool = torch.device(device), pages, pool
        self.tally, self._careful = tally or Tally(), careful
        checks.check_basis(policy, shape)
        self.bases = (
            None if policy.basis is None else Bases.of(policy.basis, shape, self.device, folded)
        )
        heads = shape.kv_heads if self.bases is None else self.bases.stored.kv_heads
        checks.check_reads(policy, shape, heads, folded)
        self.layout = Layout.of(policy, shape, self.bases, page_tokens, pooled=pool is not None)
        checks.check_replay(policy, replays, len(self.layout.shapes))
        checks.check_merge(policy, shape, [each.format for each in self.layout.pages[0]])
        self._budgets = tuple(budgets) if budgets is not None else None
        checks.check_budgets(policy, self._budgets)
        self.backend = checked_backend(
            self.device, backend, policy, shape, page_tokens, PolicyCache
        )
        checks.check_reading(policy, self.layout, self.backend, self.device, pool)
        rows = self.layout.attends_rows(policy, shape, self.bases)
        self._decode_rows = load_rows(self.backend) if rows else None
        self._followers: tuple[PolicyCache, ...] = ()  # empty caches that also store the next pass
        self.reset()

    def share_prefill(self, others: "Sequence[PolicyCache]") -> None:
        """Store the next pass of this empty cache in other empty caches, too.

        With an empty cache a prompt attends only to itself, so of a policy only its basis matters.

        Args:
            others: caches of the same shape with equal bases.

        Raises:
            ValueError: a cache holds tokens, or its basis or its replay differs.
        """
        for cache in (self, *others):
            both = self.policy, self.bases, cache.policy, cache.bases
            checks.check_shares(cache.batch, *both, alike=cache.replay == self.replay)
        self._followers = tuple(others)

    def another(self, budget: Budget | None = None) -> "PolicyCache":
        """Create an empty cache with the same settings, bases and pool, but its own budget."""
        made = copy(self)
        made._followers, made._budgets = (), None if budget is None else (budget,)
        checks.check_budgets(self.policy, made._budgets)
        made.reset()
        return made

    def reset(self) -> None:
        """Clear the cache and free its memory."""
        self.batch: Batch | None = None
        self._keeper: KeepAll | KeepSelected = KeepAll()
        self._pass: Forward | None = None
        self._next_layer = 0
        self._counted = True  # whether the last layer of this pass counts it
        self._alone: bool | None = None  # the answer of `attends_alone` in this pass
        self._order: Tensor | None = None  # the columns of this pass by position, if it needs them
        self._remaining = 0  # tokens of each prompt that later passes bring, at least
        self._rows: RowPass | None = None  # of the pass
        self._last_rows: RowPass | None = None  # of a pass before, which may serve again
        self._in_rows = False  # whether `attend` may decode as `attend_rows`
        self._shared: SharedLayer | None = None
        self._waiting: WaitingPrompts | None = None

    @property
    def replay(self) -> Replay | None:
        """The second reading of prompts that the policy asks for."""
        return None if self.selector is None else self.selector.replay

    @property
    def columns(self) -> int:
        """Columns of the batch so far, including padding."""
        return self.batch.columns if self.batch is not None else 0

    @property
    def sequences(self) -> int | None:
        """Number of sequences, or None before the first pass."""
        return len(self.batch.seen) if self.batch is not None else None

    def begin(
        self,
        valid: Bool[Tensor, "B L"],
        *,
        prompt: bool | None = None,
        remaining: int = 0,
        reach: Int[Tensor, "B L"] | None = None,
        counted: bool = True,
    ) -> None:
        """Start a pass over new columns; `valid` is False where a column is padding.

        Args:
            valid: which columns hold a token.
            prompt: whether the tokens belong to prompts; None: a sequence with earlier tokens and a
                single new one decodes, any other is prefilled.
            remaining: tokens of each prompt that later passes bring, at least; every token is kept
                until then, unless the selector plans chunks. See also `ScoringLast`.
            reach: the last column of the pass that each query sees, for prefixes and pictures whose
                tokens see each other; None: its own.
            counted: whether the last layer counts the pass and plans what is due; otherwise the
                engine calls `count` after it.

        Raises:
            ValueError: there are no columns, the batch size differs, or tokens are fewer than said.
            RuntimeError: the previous pass did not finish.
            kv_paging.PoolExhausted: a fixed pool is too small; the cache is unchanged.
        """
        self._expect_no_pass()
        checks.check_whole(self.policy, self.replay, remaining)
        sequences, columns = valid.shape
        checks.check_goes_on(self.batch, sequences, columns, remaining, self._remaining)
        batch = self.batch or self._allocate(sequences)
        of = valid, batch.seen, remaining, reach
        now = Forward.of(*of, started=batch.started, prompt=prompt)
        self._begin(batch, now)
        self._counted = counted
        for follower in self._followers:
            follower._begin(follower.batch or follower._allocate(sequences), now)

    def _begin(self, batch: Batch, now: Forward) -> None:
        self._keeper.prepare(batch, now)
        batch.update_bounds(now.whole)
        self.batch, self._pass, self._next_layer = batch, now, 0
        self._alone = self._order = self._rows = None
        self._in_rows = self._decode_rows is not None and not now.whole.is_prefill
        self._remaining = now.whole.remaining
        prompts = [part.now for part in now.parts if part.now.is_prefill]
        self._waiting = WaitingPrompts(prompts[0]) if prompts and self.replay is not None else None

    def _allocate(self, sequences: int, *, vacant: bool = False) -> Batch:
        budgets = checks.shared_out(self._budgets, sequences)
        selector = self.selector
        self._keeper = (
            KeepAll()
            if selector is None
            else KeepSelected(selector, self.shape, budgets, self.tally, careful=self._careful)
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
            vacant=vacant,
        )

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B H G Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, "H G"] | None = None,
        *,
        more: bool = False,
        expanded: Expanded | None = None,
        chosen: Bool[Tensor, "B Lq T"] | None = None,
        out: Float[Tensor, "B H G Lq Dv"] | None = None,
    ) -> Float[Tensor, "B Hv Gv Lq _"]:
        """Attend over the layer's stored tokens and the new ones, then store the new ones.

        Values and the output are by KV head, or by stored head if values are already projected. If
        values are in keys (`CacheShape.value_in_key`), they are a view of them.

        Several layers of a model may share keys and values (Gemma 3n): each calls this for the
        layer that stores them, all but the last with `more`. The new tokens are stored after the
        last, and the attention mass of all is summed. Fewer queries than columns are those of the
        last columns.

        Logits have the bound `softcap` and the `sinks` of `kv_attention.attend`; a basis changes
        neither, as it leaves logits as they are. One that shifts keys is refused with either.

        With `expanded`, the output is that of these vectors of the query heads, by whose attention
        a pass over latents has the same logits; see `attends_alone`. `out` is memory for the
        output, which may be returned, as for `kv_attention.attend`.

        `chosen` are the columns that each query attends to, of all columns of the batch with those
        of the pass, if the model selects some (DeepSeek sparse attention). Padding, later columns
        and tokens that the policy has dropped are not attended to, whatever is chosen. A query of
        which a KV head stores no chosen token attends to all that are stored there.

        Raises:
            ValueError: `softcap` is not a positive number, `sinks` are not by the query's heads,
                values are not the view of keys that they should be, `expanded` is given for a pass
                that needs more than its own tokens, or `chosen` are other columns.
            RuntimeError: `begin` was not called, or layers are out of order.
            kv_paging.PoolExhausted: a fixed pool is too small for the new tokens.
        """
        now, batch = self._expect(layer)
        checks.check_reader(self._shared, query.shape[3], now.whole.position.shape[1])
        check_softmax(query, softcap, sinks)
        if self.bases is not None:
            checks.check_shift(self.policy, self.bases.key_maps[layer], softcap, sinks)
        checks.check_prefix(self.shape, key, value)
        if self._in_rows and not more and expanded is None and chosen is None and out is None:
            done = attend_grouped(self.attend_rows, layer, query, key, value, scale, softcap, sinks)
            if done is not None:
                return done
        value_dim, unprojected = value.shape[-1], (key, value)
        if self.bases is not None:
            query = self.bases.queries(layer, query)
            sinks = by_stored_head(query, sinks)
            key, value = self.bases.keys(layer, key), self.bases.values(layer, value)
        observe, watch, fresh = self.observe, self._watch, (query, key, value)
        places = None if chosen is None else self._by_position(chosen)
        options = fresh, scale, watch, self.backend, softcap, sinks, places
        if expanded is None:
            into = out if self.bases is None else None
            result = attended(batch, now.whole, layer, *options, into, self.policy.reading)
        else:
            checks.check_alone(self.attends_alone)
            result = attended_by_head(now.whole, expanded, *options)
        observed = dict(zip(watch, (result, *result.others), strict=True))
        shared = self._shared
        if shared is None:
            shared = SharedLayer(
                queries_of(query, now.whole, scale, read=self.reads_queries), observed
            )
        else:
            shared = shared.with_reader(observed)
        self._shared = shared if more else None
        if not more:
            for cache in (self, *self._followers):
                seen = shared.observed[observe if cache is self else cache.observe]
                cache.keep(layer, key, value, seen, shared.queries, unprojected)
            if self._pass is None:
                self._followers = ()
        return result.out if self.bases is None else self.bases.undone(layer, result.out, value_dim)

    def attend_rows(
        self,
        layer: int,
        query: Float[Tensor, "m Q D"],
        key: Float[Tensor, "m H D"],
        value: Float[Tensor, "m H Dv"],
        scale: float,
        output: Float[Tensor, "m Q Dv"],
        first: int,
        softcap: float | None = None,
        sinks: Float[Tensor, "H G"] | None = None,
    ) -> bool:
        """Do what `attend` does in a decode pass, on tensors of an engine, in one call if possible.

        Args:
            layer: the layer.
            query: queries by token, of which those from row `first` on are of the sequences.
            key: the keys of the same tokens.
            value: their values.
            scale: as for `attend`.
            output: set to the attention of the sequences' rows.
            first: the row of the first sequence.
            softcap: as for `attend`.
            sinks: the same.

        Returns:
            False: the backend or the pass needs `attend`, and nothing has been done.

        Raises:
            RuntimeError: `begin` was not called, or layers are out of order.
        """
        if self._decode_rows is None or self._shared is not None or self._followers:
            return False
        now, batch = self._expect(layer)
        position = now.whole.position
        if layer == 0 and not self.reads_queries:
            made = batch, now, self._keeper, key, value, self._last_rows
            selects = self.policy.reading is not None
            self._rows = self._last_rows = RowPass.of(*made, selects=selects)
        rows = self._rows
        if rows is None or rows.lacks(layer):
            return False
        maps, into = None, output
        if self.bases is not None:
            checks.check_shift(self.policy, self.bases.key_maps[layer], softcap, sinks)
            maps = self.bases.row_maps[layer]
            query, key, value, into = self.bases.unpadded(layer, query, key, value, output)
        pages, groups = rows.pages[layer]
        pages = pages_read(batch, layer, query, first, pages, self.policy.reading, self.backend)
        inputs = RowInputs(
            *(query, key, value, into, first, position, pages, scale, softcap, sinks),
            copies=rows.copies[layer],
            observations=(self.observe,),
            running=rows.running,
            page_positions=rows.places,
            maps=maps,
            groups=groups,
            memo=rows.memo,
            kept=rows.kept[layer],
        )
        result = self._decode_rows(inputs)
        if result is None:
            return False
        if into is not output:
            output[first : first + len(position), :, into.shape[2] :] = 0
        if not rows.together:
            self.keep(layer, *rows.fresh[layer], result)
            return True
        self._next_layer += 1
        if rows.take(result, self._keeper, batch, now.parts[0].now):
            self._finish(now, batch, ())
        return True

    def begin_drafts(self, drafts: Sequence[Bool[Tensor, "B 1"]]) -> Verified:
        """Let drafts follow the tokens of a decode pass, after `begin`; return their attention.

        Args:
            drafts: which sequences have one in each further column, and in all columns before it.

        Raises:
            RuntimeError: `begin` was not called.
            ValueError: drafts would not be attended as decoded tokens, see `unlike_drafts`.
        """
        now, batch = self._expect(0)
        checks.check_drafts(self.policy)
        self._in_rows = False  # drafts may move pages between layers
        return Verified.of(now.whole, drafts, batch, self.policy, self.bases, self.backend)

    def _by_position(self, chosen: Bool[Tensor, "B Lq T"]) -> Bool[Tensor, "B Lq T"]:
        """Return which tokens are chosen in the current pass, by position."""
        now, batch = self._expect(self._next_layer)
        if self._order is None:
            self._order = batch.column_order(now.whole)
        checks.check_chosen(chosen, self._order.shape[1], batch.columns)
        return chosen.gather(2, self._order[:, None].expand(-1, chosen.shape[1], -1))

    @property
    def _watch(self) -> tuple[Observe, ...]:
        """The observations of the current pass, those of caches that share it last."""
        first = self.observe
        return (first, *({f.observe for f in self._followers} - {first}))

    @property
    def attends_alone(self) -> bool:
        """Whether the current pass attends to its own tokens, and observes its last columns alone.

        Its output may then be computed from vectors expanded by the model, see `attend`. The first
        call in a pass synchronizes with the device.
        """
        if self._alone is None:
            now, batch = self._pass, self.batch
            new = now is not None and batch is not None and not batch.columns
            self._alone = new and now is not None and observes_tail(now.whole, self._watch)
        return self._alone

    @property
    def reads_queries(self) -> bool:
        """Whether queries are read after attention; if not, their memory may be used again."""
        selectors = [reader.selector for reader in (self, *self._followers)]
        return any(each is not None and "queries" in each.reads for each in selectors)

    @property
    def observe(self) -> Observe:
        """The observations that the current pass needs."""
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
        unprojected: tuple[Float[Tensor, "B Hk L Dk"], Float[Tensor, "B Hu L Du"]] | None = None,
    ) -> None:
        """Store a layer's new tokens, given the observations of its attention.

        `attend` calls this itself. Several empty caches with the same basis may share the attention
        of one prompt: one cache attends, and the others call this with the observations of the new
        tokens, which are the last entry of `result`. Keys and values are projected if the policy
        has a basis; `unprojected` are those of the model (None: the same), for a selector that
        scores tokens once.

        Raises:
            RuntimeError: `begin` was not called, or layers are out of order.
            kv_paging.PoolExhausted: a fixed pool is too small for the new tokens.
        """
        now, batch = self._expect(layer)
        keeper = self._keeper
        if self._rows is not None:
            self._rows.take_each(keeper, batch, now.parts[0].now)
        for part in now.parts:
            fresh = part.vectors(key), part.vectors(value)
            seen = part.observed(result), part.queries(queries)
            key_in, value_in = unprojected or (key, value)
            own = part.vectors(key_in), part.vectors(value_in)
            keeper.take(batch, part.now, layer, *fresh, *seen, own)
        if self._waiting is not None:
            self._waiting.add(key, value)
        self._next_layer += 1
        if self._next_layer == self.shape.layers and self._waiting is None:
            self._finish(now, batch, ())

    def _finish(self, now: Forward, batch: Batch, replayed: Sequence[Tensor]) -> None:
        """Store what waited for all layers; `replayed` are the scores of a replay by layer."""
        keeper = self._keeper
        # Prompts were scored with the tokens stored at that time, so they are finished first.
        for part in reversed(now.parts):
            keeper.finish(batch, part.now, replayed)
        batch.advance(now.whole)
        batch.count(now.whole)
        self._pass = self._waiting = None
        if self._counted:
            stepped = [part.now.rows for part in now.parts if not part.now.is_prefill]
            keeper.after(batch, stepped[0] if stepped else ())

    def count(self) -> None:
        """Count a decode pass of all sequences, and plan those that are due."""
        if self.batch is not None:
            self._keeper.after(self.batch, None)

    def fix(self, sequences: int, tokens: int) -> None:
        """Allocate memory for decoding requests, which stays where it is.

        All sequences are vacant: without a token, which a step must not give them. Requests take
        their places by `adopt`, until `clear`, and `prepare` precedes each pass. What such a pass
        launches depends on no request, so it can be captured and launched again.

        Args:
            sequences: the most requests.
            tokens: the most tokens of a request.

        Raises:
            ValueError: the cache holds tokens, or has a pool of its own.
        """
        if self.batch is not None or self._pool is None:
            raise ValueError("memory of an empty cache over a shared pool can be fixed, no other")
        self.batch = self._allocate(sequences, vacant=True)
        self.batch.fix(tokens)
        self._keeper.fix(self.batch)

    def adopt(self, sequence: int, other: "PolicyCache") -> None:
        """Let the only sequence of another cache take the place of a vacant one, in place.

        Raises:
            ValueError: as `join`; nothing has changed.
        """
        if self.batch is None or other.batch is None or other._remaining:
            raise ValueError("only a sequence with a finished prompt can take a vacant place")
        self.batch.adopt(sequence, other.batch)  # raises before anything has changed
        self._keeper.adopt(sequence, other._keeper)
        other.reset()

    def clear(self, sequences: Collection[int]) -> None:
        """Free sequences, which are vacant then, and drop an unfinished pass."""
        self._pass = self._shared = None
        self._keeper.abandon()
        if self.batch is not None and sequences:
            self.batch.clear(sequences)
            self._keeper.clear(sequences)

    def prepare(self, row: Int[Tensor, " B"]) -> None:
        """Reserve pages for the next step of a cache with fixed memory.

        Args:
            row: a number of 0 or more for each sequence that gets a token.

        Raises:
            kv_paging.PoolExhausted: the pool may have too few pages; nothing has changed.
            ValueError: a sequence is longer than its memory.
        """
        if self.batch is not None:
            self.batch.prepare(row)

    def take_any_length(self) -> None:
        """Let the next pass launch what is launched for sequences of any length."""
        assert self.batch is not None, "it is fixed"
        self.batch.take_any_length()

    @property
    def waiting(self) -> Pass | None:
        """The prompts of a pass that all layers have attended to, and that wait for their replay.

        The pass is unfinished: the engine runs the model over each chunk of them with the attention
        of `reread`, and then calls `replayed`. None: no prompt waits.
        """
        waits = self._waiting is not None and self._next_layer == self.shape.layers
        return self._waiting.now if waits and self._waiting is not None else None

    def reread(self, chunk: ReplayChunk) -> Rereading:
        """Return the attention of a pass over a chunk of the waiting prompts.

        Raises:
            RuntimeError: no prompt waits.
        """
        return Rereading(*self._expect_waiting(), self.bases, chunk, self.backend)

    def replayed(self) -> None:
        """Plan and store the waiting prompts, also in caches that share their prefill.

        Raises:
            RuntimeError: no prompt waits.
            kv_paging.PoolExhausted: a fixed pool is too small for the new tokens.
        """
        prompts, _ = self._expect_waiting()
        followers, self._followers = self._followers, ()
        for cache in (self, *followers):
            now, batch = cache._pass, cache.batch
            assert now is not None  # a follower waits for the same replay
            assert batch is not None
            cache._finish(now, batch, prompts.replayed)

    def _expect_waiting(self) -> tuple[WaitingPrompts, Batch]:
        if self.waiting is None or self._waiting is None or self.batch is None:
            raise RuntimeError("no prompt waits for a replay; run a forward pass over one first")
        return self._waiting, self.batch

    def _expect(self, layer: int) -> tuple[Forward, Batch]:
        now, batch = self._pass, self.batch
        if now is None or batch is None or layer != self._next_layer:
            expected = "a call of begin()" if now is None else f"layer {self._next_layer}"
            raise RuntimeError(f"layer {layer} attends, but {expected} was expected")
        return now, batch

    def join(self, other: "PolicyCache") -> None:
        """Append the sequences of another cache over the same pool, which empties it.

        Raises:
            ValueError: the layouts or pools differ, or a prompt is unfinished; nothing has changed.
        """
        if self.batch is None or other.batch is None:
            raise ValueError("an empty cache cannot be joined with another")
        if self._remaining or other._remaining:
            raise ValueError("a batch with unfinished prompts cannot be joined")
        self.batch.join(other.batch)  # raises before anything has changed
        mine, theirs = self._keeper, other._keeper
        if isinstance(mine, KeepSelected) and isinstance(theirs, KeepSelected):
            mine.join(theirs)
        other.reset()

    def branch(self, sequence: int = 0, *, whole: bool = False) -> "PolicyCache":
        """Return a cache over the same pool that continues one of the sequences.

        Both hold the same full pages if the policy only appends generated tokens; otherwise pages
        are copied, as are later those in which tokens are evicted, moved or scored. `whole` as for
        `Batch.branch`.

        Raises:
            kv_paging.PoolExhausted: too few pages for copies; nothing has changed.
            RuntimeError: a pass is unfinished.
            ValueError: there are no tokens, prompts are unfinished, or the pool is not shared.
        """
        self._expect_no_pass()
        checks.check_branch(self.batch, self._remaining, over_shared=self._pool is not None)
        assert self.batch is not None, "checked"
        made = self.another()
        batch = made._allocate(1, vacant=True)
        self.batch.branch(sequence, batch, share=self._keeper.grows, whole=whole)
        self._keeper.branch(sequence, made._keeper)
        made.batch = batch
        return made

    def failures(self) -> dict[int, Exception]:
        """Return and clear the selector's errors by sequence, if the cache is careful."""
        return self._keeper.failures() if isinstance(self._keeper, KeepSelected) else {}

    def release(self) -> None:
        """Clear the cache and return all pages to the pool, which may be shared."""
        if self.batch is not None:
            self.batch.release()
        self.reset()

    def compress(self, pages: int | None = None) -> list[int]:
        """Plan sequences now, as the policy does when pages are short.

        Args:
            pages: approximate number of pages to free, with few sequences, oldest plan first; if
                all together cannot free so many, none is planned. None: all above budget.

        Returns:
            The planned sequences; none without `Replan.short`, or while prompts are unfinished.
        """
        batch = None if self._remaining else self.batch
        return [] if batch is None else self._keeper.compress(batch, pages)

    def select(self, source: Int[Tensor, " B2"]) -> None:
        """Reorder sequences to source[0], source[1], ...: beams, repeats, subsets.

        A sequence named again holds the same pages if the policy only appends generated tokens.
        """
        if self.batch is not None:
            source = to_device(source, self.device)
            self.batch.select(source, share=self._keeper.grows)
            self._keeper.select(source)

    @property
    def held_columns(self) -> Bool[Tensor, "B T"] | None:
        """Which columns hold a token; None: the cache is empty, or the pool is shared."""
        record = None if self.batch is None else self.batch.record
        return None if record is None or not record.count else record.held

    @property
    def rolls_back(self) -> bool:
        """Whether the newest columns can be removed."""
        return self._pool is None and rolls_back(self.policy)

    def roll_back(self, columns: int) -> None:
        """Remove the newest `columns` columns, with the sequences' tokens in them.

        Raises:
            RuntimeError: a pass is unfinished.
            ValueError: the policy does not support it, the pool is shared, or columns are too few.
        """
        self._expect_no_pass()
        checks.check_rolls_back(self.policy, self.rolls_back)
        if columns and self.batch is None:
            raise ValueError(f"{columns} columns cannot be taken back: the cache holds none")
        if columns and self.batch is not None:
            self.batch.take_back(columns)

    def facts(self) -> CacheFacts:
        """Return what a state of this cache is of.

        Raises:
            ValueError: the cache is empty.
        """
        if self.batch is None or not self.batch.columns:
            raise ValueError("an empty cache has no state; run a forward pass over a prompt first")
        return facts_of(self.policy, self.layout, self.bases, self.batch, self._keeper.plans())

    def state(self) -> CacheState:
        """Return the state between two passes, for `restore`; it has no pages.

        Synchronizes with the device, and copies the stored bytes to the CPU.

        Raises:
            RuntimeError: a pass is unfinished.
            ValueError: the cache is empty, prompts are unfinished, or the pool is shared.
        """
        self._expect_no_pass()
        facts, plans = self.facts(), self._keeper.plans()
        if self._remaining:
            raise ValueError("a cache with unfinished prompts has no state; finish them first")
        assert self.batch is not None  # checked by `facts`
        with torch.inference_mode(False), torch.no_grad():
            return CacheState(facts, tensors_of(self.batch, plans))

    def restore(self, state: CacheState, *more: CacheState) -> None:
        """Continue from the state of another cache of this policy and shape, and of this basis.

        Page size, pool and device may differ, and the pool may be shared. The state may be from an
        untrusted file. Of several, the tokens follow each other as in `joined.joined`.

        Raises:
            ValueError: the cache holds tokens, or a state is of another policy, shape or basis, or
                the policy does not allow several; nothing has changed.
            DamagedStateError: a state contradicts itself; nothing has changed.
            kv_paging.PoolExhausted: a fixed pool is too small; nothing has changed.
        """
        if self.batch is not None:
            raise ValueError("a state is restored in an empty cache; create a new one, or reset it")
        state = checked_states(self.policy, self.layout, self.bases, (state, *more))
        plans = plans_of(self.layout, self.selector, state)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.batch = self._allocate(state.facts.sequences)
                fill(self.batch, state)
                if isinstance(self._keeper, KeepSelected) and plans is not None:
                    self._keeper.restore(plans, self.device)
        except BaseException:
            self.release()
            raise

    def __deepcopy__(self, memo: dict[int, object]) -> "PolicyCache":
        """Copy the cache with a private pool of the same size; policy and bases are shared.

        Raises:
            RuntimeError: a pass is unfinished.
            ValueError: the pool is shared with other caches.
        """
        self._expect_no_pass()
        checks.check_copied(over_shared=self._pool is not None)
        made = copy(self)
        made._followers = ()
        shared = [self.policy, self.shape, self.layout, self.bases]
        if isinstance(self._keeper, KeepSelected):
            shared.append(self._keeper.selector)
        if self.batch is not None:
            shared += self.batch.unchanging
        memo |= {id(self): made} | {id(x): x for x in shared if x is not None}
        # Like stored tokens, a copy must not consist of inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            made.tally = deepcopy(self.tally, memo)
            made.batch, made._keeper = deepcopy((self.batch, self._keeper), memo)
        return made

    def _expect_no_pass(self) -> None:
        if self._pass is not None:
            checks.refuse_unfinished(self._next_layer, self.shape.layers)

    def memory(self) -> MemoryReport:
        """Count the memory of the cache, by name."""
        basis = 0 if self.bases is None else self.bases.nbytes
        if self.batch is None:
            return MemoryReport.empty(self.layout, basis)
        return self.batch.memory(self.shape.token_bytes, basis)
