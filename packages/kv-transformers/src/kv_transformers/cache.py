"""The compressed cache for models of transformers."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kv_policy import Budget, KVPolicy, parse
from kv_runtime import (
    AUTO,
    DamagedStateError,
    MemoryReport,
    PolicyCache,
    TokenVectors,
    Verified,
    store_drafts,
    unlike_drafts,
)
from kv_transformers import document
from kv_transformers.document import Document
from kv_transformers.drafting import attend_verified, expect_drafts, is_exact
from kv_transformers.fitted import check_fitted
from kv_transformers.fold import expect_fold, folded_by
from kv_transformers.fresh_layer import AttendingCache
from kv_transformers.latents import Absorbed
from kv_transformers.layers import cache_bytes, expect_croppable, records_past
from kv_transformers.masks import MaskCheck
from kv_transformers.own_states import own_tensors, restore_own
from kv_transformers.pass_columns import PassColumns
from kv_transformers.replay import Attention, GroupedAttention, Replayer
from kv_transformers.rotary import with_ropes
from kv_transformers.softmax import Softmax
from kv_transformers.support import (
    cache_shape,
    expect_only_stored,
    expect_order,
    expect_shift_invariant,
)
from kv_transformers.switch import install

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompressedCache(AttendingCache):
    """A KV cache compressed by a policy.

    Pass it as `cache` to `generate` or to a forward pass; before transformers 5.24 that argument is
    named `past_key_values`. Attention runs over the pages; the cache never holds an uncompressed
    copy of stored tokens. During prefill, a layer's new keys and values exist uncompressed (those
    of all layers, for a policy that plans over all layers at once or reads the prompt again).

    Passes over the cache use a separate attention function. The model's other calls, with other
    caches or none, use its configured implementation as before; `kv_transformers.uninstall` removes
    the hooks that switch between them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: KVPolicy | str,
        *,
        pages: int | None = None,
        page_tokens: int = 16,
        budgets: Sequence[Budget | None] | None = None,
        backend: str = AUTO,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> None:
        """Create an empty cache for a model.

        Args:
            model: a decoder-only model of transformers. The policy stores the keys and values of
                the layers that attend to every token; others, such as those with a sliding window
                or linear attention, keep transformers' own cache.
            policy: a policy or its text form, such as `snapkv:budget=1024+k8v4`.
            pages: size of a fixed page pool; None: the pool grows as needed.
            page_tokens: tokens of the first tier per page.
            budgets: a budget per sequence of the batch, None for the policy's own.
            backend: a name in `kv_attention.all_backends()`; `auto` is the fastest available one.
            tokenizer: the model's, for a policy that reads each prompt again after an instruction,
                such as `kvzip`; others do not need it.

        Raises:
            UnsupportedModelError: the model's attention is not supported.
            ValueError: the policy's text, the policy itself or a budget is invalid, the policy was
                calibrated with another model, the model is folded for another basis, the backend is
                unavailable, or a tokenizer is needed and missing.
        """
        expect_order(model, policy)
        self.policy = parse(policy) if isinstance(policy, str) else policy
        check_fitted(model, self.policy)
        shape = with_ropes(model, cache_shape(model), self.policy)
        self._fold = expect_fold(model, self.policy)
        self.runtime = PolicyCache(
            self.policy,
            shape,
            pages=pages,
            page_tokens=page_tokens,
            budgets=budgets,
            device=model.device,
            backend=backend,
            folded=frozenset() if self._fold is None else self._fold.what,
            replays=True,
        )
        if self.runtime.bases is not None and self.runtime.bases.shifted:
            expect_shift_invariant(model, self.policy)
        if self.runtime.replay is not None:
            expect_only_stored(model, self.policy)
        self._replayer = Replayer.of(self.policy, self.runtime.replay, tokenizer)
        self._device = model.device
        self._masks = MaskCheck(waits=self._device.type == "cpu")
        install(model)
        super().__init__(model)
        self._readers_of = [kind.readers for kind in self._kinds if kind.index is not None]
        self._readers = 0  # calls of layers that read the keys of the current one, still to come
        self._followers: tuple[CompressedCache, ...] = ()  # that share the next pass
        self._assisted = False  # drafts may be in the passes that say so
        self._drafts = 0  # of the current pass
        self._verified: Verified | None = None  # their attention
        self._pending: tuple[TokenVectors, ...] = ()  # drafts of the last pass, until a crop
        self.document: Document | None = None  # what the cache was loaded from

    def share_prefill(self, others: "Sequence[CompressedCache]") -> None:
        """Store the next pass over this empty cache in other empty caches of its model, too.

        Args:
            others: caches whose bases and replays are equal to those of this one.

        Raises:
            ValueError: a cache is of another model, holds tokens, or its basis or replay differs.
        """
        for cache in others:
            if cache.model is not self.model:
                raise ValueError(
                    f"a cache under {cache.policy} is of another model than the one under "
                    f"{self.policy}, so they cannot share a prefill"
                )
        self.runtime.share_prefill([cache.runtime for cache in others])
        self._followers = tuple(others)

    @property
    def columns(self) -> int:
        """Number of columns seen, including padding and evicted tokens."""
        return self.runtime.columns + len(self._pending)

    @property
    def assisted(self) -> bool:
        """Whether passes are those of assisted generation, with drafts that a crop may remove."""
        return self._assisted

    def activate_past_recording(self) -> None:
        """Prepare for assisted generation, whose passes have drafts that a crop may remove.

        Own layers of transformers keep what they drop otherwise, until `crop`.
        """
        super().activate_past_recording()  # type: ignore[no-untyped-call]
        self._assisted = not is_exact(self.policy)

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the columns that a mask must cover: all columns seen.

        Raises:
            ValueError: the pass has no new column.
        """
        if query_length == 0:
            raise ValueError(_nothing_new(self.columns))
        return super().mask_sizes(query_length)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq Lq D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        softmax: Softmax,
        columns: PassColumns,
    ) -> Float[Tensor, "B Lq *out"]:
        """Attend over the stored and the new tokens, then store the new ones.

        A layer whose keys and values others read stores them after the last of these.

        The output is by query head, or packed for a folded output projection.
        """
        # Stored tensors outlive the pass, so they must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            self._begin(layer, query, columns)
            attend = self._attend_of(layer, columns)
            return self._around(attend)(layer, query, key, value, softmax)

    @property
    def expands(self) -> bool:
        """Whether the next pass may attend to keys and values that the model expands."""
        return not self.columns

    def attend_latents(
        self, layer: int, given: Absorbed, softmax: Softmax, columns: PassColumns
    ) -> Float[Tensor, "B L Hq Dv"]:
        """Attend over the stored and the new latents, then store the new ones.

        A prompt without stored tokens attends to the keys and values that the model has expanded,
        which are shorter, unless all its queries are observed.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._begin(layer, given.query, columns)
            alone = given.expanded is not None and self.runtime.attends_alone
            expanded = given.expanded if alone else None
            attend = partial(self.runtime.attend, expanded=expanded, chosen=columns.chosen)
            attention = self._around(attend)
            out = attention(layer, given.query, given.key, given.value, softmax)
            return out if alone else given.heads(out)

    def _begin(self, layer: int, query: Tensor, columns: PassColumns) -> None:
        """Begin a pass of the runtime with its first layer."""
        if layer == 0 and not self._readers:
            self._expect_same_device(query.device)
            self._expect_same_fold()
            valid = self._columns(query, columns.valid)
            if not self._drafts:
                self.runtime.begin(valid, reach=columns.reach)
                return
            self._expect_drafts(valid, columns)
            first, *drafts = valid.split(1, 1)
            self.runtime.begin(first, prompt=False)
            self._verified = self.runtime.begin_drafts(drafts)

    def _expect_drafts(self, valid: Bool[Tensor, "B L"], columns: PassColumns) -> None:
        """Raise if a pass with drafts is none of assisted generation.

        Raises:
            ValueError: its drafts would not attend as generated tokens, or it has several
                sequences, padding, or tokens that see later ones.
        """
        expect_drafts(
            self.policy,
            self.runtime.shape,
            held=self.columns,
            columns=valid.shape[1],
            drafts=self._drafts,
            indexed=self.indexes,
        )
        if len(valid) > 1 or not bool(valid.all()) or columns.reach is not None:
            raise ValueError(
                "drafts are verified for one sequence without padding, whose tokens see none after "
                "them; generate without an assistant or prompt lookup"
            )

    def _attend_of(self, layer: int, columns: PassColumns) -> GroupedAttention:
        """Return the attention of the runtime for a layer, or for one that reads its keys."""
        self._readers = (self._readers or 1 + self._readers_of[layer]) - 1
        if self._drafts:
            assert self._verified is not None, "the pass has begun"
            more = bool(self._readers)
            return partial(attend_verified, self.runtime, self._verified, more=more)
        if columns.chosen is None and not self._readers:
            return self.runtime.attend
        return partial(self.runtime.attend, more=bool(self._readers), chosen=columns.chosen)

    def start(self, drafts: int = 0) -> None:
        """Forget what an interrupted pass left, and store the drafts of the last one."""
        self._confirm()
        self._readers, self._drafts = 0, drafts if self._assisted else 0

    def _confirm(self, wrong: int = 0) -> None:
        """Store the drafts of the last pass that no crop has removed, but the last `wrong`."""
        pending, self._pending = self._pending, ()
        right = pending[: len(pending) - wrong]
        valid = torch.ones(1, 1, dtype=torch.bool, device=self._device)
        with torch.inference_mode(False), torch.no_grad():
            for token in right:
                store_drafts(self.runtime, valid, token)

    def _around(self, attend: GroupedAttention) -> Attention:
        """Wrap attention by KV head of the runtime as attention of the model, folded or not."""

        def attention(
            layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax
        ) -> Float[Tensor, "B Lq *out"]:
            grouped = query.unflatten(1, (key.shape[1], -1))
            options = softmax.scale, softmax.softcap, softmax.sinks_by_head(key.shape[1])
            if self._fold is None or "values" not in self._fold.what:
                out = attend(layer, grouped, key, value, *options)
                return out.flatten(1, 2).transpose(1, 2).contiguous()
            packing = self._fold.packing[layer]
            return packing.pack(attend(layer, grouped, key, packing.unpack(value), *options))

        return attention

    def expect_ids(self, ids: Int[Tensor, "B L"] | None) -> None:
        """Raise if the policy reads prompts again and the model is given embeddings.

        Raises:
            ValueError: it does, and is.
        """
        if self._replayer is not None and ids is None:
            raise ValueError(
                f"{self.policy} lets the model read each prompt again by its token ids, but the "
                "model was called with embeddings (inputs_embeds, images or sounds); pass "
                "input_ids, or use a policy that reads prompts once, such as kv-compress"
            )

    def end(self, ids: Int[Tensor, "B L"] | None) -> None:
        """Let the model read prompts again, if the policy asks for it, and store them.

        Caches that share the pass get copies of what transformers caches of other layers.

        Raises:
            RuntimeError: the model was deleted.
        """
        if self._replayer is not None and self.runtime.waiting is not None:
            model = self.model
            if model is None or ids is None:
                raise RuntimeError("the model of this compressed cache was deleted during its pass")
            # As in `attend`: scores are stored.
            with torch.inference_mode(False), torch.no_grad():
                self._replayer.run(model, self.runtime, self._around, ids)
        if self._drafts:
            assert self._verified is not None, "the pass has begun"
            self._pending = self._verified.pending(0, self.runtime.columns, self._drafts).drafts
        followers, self._followers = self._followers, ()
        for cache in followers:
            cache.layers = self._copied_layers(cache, {})

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Raise if the tokens of a pass do not follow the stored ones.

        With a used cache, `generate` passes the end of its input, with positions from its start.
        """
        batch = self.runtime.batch
        if batch is None or not batch.columns:
            return
        held = batch.seen
        real = position.new_ones(1, 1, dtype=torch.bool) if valid is None else valid
        real = real.expand(len(held), position.shape[1])
        place = position.expand(len(held), -1).gather(1, real.long().argmax(1, keepdim=True))[:, 0]
        wrong = (place < held) & real.any(1)
        if bool(wrong.any()):
            row = int(wrong.long().argmax())
            raise ValueError(_other_prompt(int(held[row]), int(place[row])))

    def expect_mask(self, mask: Bool[Tensor, "B T"] | None, fresh: int) -> None:
        """Raise if a 2D mask hides stored columns or shows padding; nothing is stored then.

        Raises:
            ValueError: it does.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._masks = self._masks.after(mask, self.runtime.held_columns, fresh)

    def _expect_same_device(self, found: torch.device) -> None:
        """Raise if the model runs on another device than the cache."""
        if found != self._device:
            raise RuntimeError(
                f"the model runs on {found}, but this cache was made while it was on "
                f"{self._device}: the model was moved or is offloaded; create a cache where it runs"
            )

    def _expect_same_fold(self) -> None:
        """Raise if projections were folded or restored since the cache was made."""
        model = self.model
        if model is not None and folded_by(model) is not self._fold:
            raise RuntimeError(
                "the model was folded or restored since this cache was made, so the stored "
                "vectors do not match it; create a new cache"
            )

    @staticmethod
    def _columns(query: Tensor, valid: Bool[Tensor, "B L"] | None) -> Bool[Tensor, "B L"]:
        batch, _, length, _ = query.shape
        if valid is None:
            return torch.ones(batch, length, dtype=torch.bool, device=query.device)
        return valid.expand(batch, length)

    def memory(self) -> MemoryReport:
        """Return the bytes by name, and the kept tokens per stored layer, sequence and KV head.

        `other_bytes` are those of layers that transformers caches, such as sliding windows, of
        states of linear attention, and of an indexer's keys; the policy does not change them.
        `full_bytes` includes them.
        """
        report, other = self.runtime.memory(), cache_bytes(self.own_layers)
        return replace(report, other_bytes=other, full_bytes=report.full_bytes + other)

    def __repr__(self) -> str:
        """Return the policy, and what the cache holds, in a line."""
        held, sequences = "no tokens", self.runtime.sequences
        if sequences and self.columns:
            report = self.memory()
            held = (
                f"{sequences} x {self.columns:,} tokens, {report.tokens.float().mean():,.0f} kept "
                f"per head, {report.total_bytes:,} bytes, {report.ratio:.1%} of uncompressed"
            )
        return f"{type(self).__name__}({self.policy}: {held})"

    def reset(self) -> None:
        """Clear the cache and free its memory."""
        self.runtime.reset()
        self.document, self._pending = None, ()
        self.layers = self._empty_layers()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Reorder the sequences by their parent beams."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " B2"]) -> None:
        """Keep only some sequences, in the given order."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, with copies adjacent."""
        batch = self.runtime.sequences
        if batch is not None:
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def _select(self, source: Int[Tensor, " B2"]) -> None:
        self._confirm()
        # As in `attend`: stored tensors must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            self.runtime.select(source.clone())
            for layer in self.own_layers:
                layer.reorder_cache(source)

    @property
    def batch_size(self) -> int:
        """Number of sequences, or -1 before the first pass."""
        batch = self.runtime.sequences
        return -1 if batch is None else batch

    @property
    def is_initialized(self) -> bool:
        """Whether a pass has begun."""
        return self.runtime.sequences is not None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works: the policy keeps every token, and no layer a recurrent state.

        In assisted generation drafts are not stored before a crop, so most policies work.
        """
        drafts = self._assisted and unlike_drafts(self.policy) is None
        removes = drafts or self.runtime.rolls_back
        return removes and all(layer.is_croppable for layer in self.own_layers)

    def crop(self, tokens_to_remove: int | Int[Tensor, ""]) -> None:
        """Remove the newest columns, given as a negative number; 0 does nothing.

        A sequence loses its tokens in these columns; padding is ignored.

        Raises:
            ValueError: the number is positive or larger than the number of columns, or the policy
                or a layer that transformers caches cannot take tokens back; the cache is unchanged.
        """
        given = int(tokens_to_remove)  # transformers 5.16 passes a tensor with one element
        drafts = min(max(0, -given), len(self._pending))
        columns = given + drafts
        if columns <= 0:
            self._confirm(wrong=drafts)
        if columns:
            if columns > 0 and self.runtime.rolls_back:
                raise ValueError(_advice(columns, self.runtime.columns))
            if self.runtime.rolls_back:
                expect_croppable(self.own_layers)
            with torch.inference_mode(False), torch.no_grad():
                self.runtime.roll_back(abs(columns))
        for layer in self.own_layers:
            if given or records_past(layer):  # 0, too, drops what was recorded
                layer.crop(given)

    def save(
        self,
        path: str | Path,
        ids: Int[Tensor, "B T"] | None = None,
        *,
        private: bool = False,
        chat: bool | None = None,
    ) -> None:
        """Write the cache to a file, for `load`, atomically.

        Pages are not in the file, only the tokens that they hold, byte for byte: it is about as
        large as the bytes held, and is loaded with any page size and on any device.

        Args:
            path: the file, commonly `*.kv`; it has the safetensors format.
            ids: the ids of the cache's columns, with which those of a later prompt are compared.
            private: whether the file has the hash of the ids instead.
            chat: whether the tokens are the begin of a chat; `kv-serve generate` goes by it.

        Raises:
            RuntimeError: the previous forward pass did not finish, or the model was deleted.
            ValueError: the cache is empty, the model was not loaded from files, the ids are of
                another shape, or a layer of the model keeps keys of an indexer, which are not
                saved.
            OSError: writing failed; an existing file is unchanged.
        """
        model = self.model
        if model is None:
            raise RuntimeError("the model of this compressed cache was deleted")
        self._confirm()
        own, state = own_tensors([*self.own_layers]), self.runtime.state()
        document.save(Path(path), model, state, ids, own, private=private, chat=chat)

    @classmethod
    def load(
        cls,
        model: PreTrainedModel,
        path: str | Path | Sequence[str | Path],
        *,
        policy: KVPolicy | str | None = None,
        ids: Int[Tensor, "B L"] | None = None,
        pages: int | None = None,
        page_tokens: int = 16,
        backend: str = AUTO,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> "CompressedCache":
        """Create a cache with the tokens of a saved one.

        The next pass computes what it would have with the saved cache: bit for bit with the same
        page size, backend and device. The attribute `document` has the ids of the file.

        Several files give a cache with their tokens one after another. Each document stays as it
        was compressed, with keys rotated by the positions of its own prompt, and does not attend
        to those before it; what follows attends to all (parallel context windows, Ratner et al.,
        2023, arXiv:2212.10947). Raw windows, block formats, sums of attention over a sequence and
        thresholds of tiers are of one prompt, so policies with them are refused.

        Args:
            model: the model of the saved cache, loaded from the same files.
            path: the file, or several in the order of their tokens.
            policy: the policy that the files must have; None: any, the same in all.
            ids: token ids that must begin with those of the files; None: they are not compared.
            pages: as for a new cache.
            page_tokens: as for a new cache.
            backend: as for a new cache.
            tokenizer: as for a new cache.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is damaged, cut, of a newer format or no document; it is of another
                model, policy or calibration, or of other ids; several files cannot follow each
                other; or as for a new cache.
            kv_paging.PoolExhausted: `pages` are too few.
        """
        paths = [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]
        if not paths:
            raise ValueError("no file was given; name one, or several in the order of their tokens")
        named = ", ".join(map(str, paths))
        read = [document.load(each, model) for each in paths]
        policy = document.expect_policies(paths, [facts for facts, _, _ in read], policy)
        found = document.one_after_another([each for _, each, _ in read])
        if ids is not None:
            found.expect(ids)
        cache = cls(
            model,
            policy,
            pages=pages,
            page_tokens=page_tokens,
            backend=backend,
            tokenizer=tokenizer,
        )
        try:
            cache.runtime.restore(*[state for _, _, state in read])
        except DamagedStateError as error:
            raise document.damaged(named, error) from None
        except ValueError as error:
            raise ValueError(f"{named} cannot be used here: {error}") from None
        try:
            with torch.inference_mode(False), torch.no_grad():
                restore_own([*cache.own_layers], found.own, found.held, model.device)
        except ValueError as error:
            raise document.damaged(named, error) from None
        cache.document = found
        cache._masks = replace(cache._masks, masked=not bool(found.held.all()))
        return cache

    def __deepcopy__(self, memo: dict[int, object]) -> "CompressedCache":
        """Copy the cache, for the same model, with a separate pool of the same size.

        Several answers may thus continue one prompt. The policy and the model are shared.

        Raises:
            RuntimeError: the previous forward pass did not finish.
        """
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self), runtime=deepcopy(self.runtime, memo))
        made.layers = self._copied_layers(made, memo)
        return made

    def __copy__(self) -> NoReturn:
        """Raise, as a shallow copy would share the pages.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "copy.copy(cache) would create two caches that write to the same pages; "
            "copy.deepcopy(cache) creates one with its own pages"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise, as a cache cannot be pickled or saved by `torch.save`; see `save`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a CompressedCache cannot be pickled: it belongs to a model in this process; write it "
            "with cache.save(path) and read it with CompressedCache.load(model, path), or use "
            "copy.deepcopy(cache) for a copy in this process"
        )


_GO_ON = (
    "for another prompt call reset() on the cache or create a new one; to continue, pass "
    "generate() the whole conversation, of which it prefills only the new part"
)


def _nothing_new(columns: int) -> str:
    """Return the error for a pass without columns."""
    if not columns:
        return "the prompt is empty; pass at least one sequence of at least one token"
    return (
        f"the cache holds {columns} columns of tokens, but the input has none after them: {_GO_ON}"
    )


def _other_prompt(held: int, place: int) -> str:
    """Return the error for tokens that do not follow the stored ones."""
    return (
        f"the cache holds {held} tokens of a sequence, but the input begins at position {place}, "
        f"not after them: {_GO_ON}"
    )


def _advice(tokens: int, columns: int) -> str:
    """Return the error for `crop` with a positive number, with the right call."""
    said = f"crop({tokens}) was called, but crop takes the columns to remove as a negative number"
    if tokens >= columns:
        return f"{said}; the cache holds {columns}, so there is nothing to remove to keep {tokens}"
    keep = f"crop({tokens - columns}) keeps the first {tokens} of the {columns} columns held"
    return f"{said}: {keep}, and crop({-tokens}) removes the last {tokens}"
