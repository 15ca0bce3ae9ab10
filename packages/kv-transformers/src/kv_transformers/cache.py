"""The compressed cache as the cache of a model of transformers."""

from collections.abc import Sequence
from copy import deepcopy
from typing import NoReturn
from weakref import ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kv_policy import Budget, KVPolicy, parse
from kv_runtime import AUTO, MemoryReport, PolicyCache
from kv_transformers.fitted import check_fitted
from kv_transformers.fold import expect_fold, folded_by
from kv_transformers.fresh_layer import AttendingCache, FreshLayer
from kv_transformers.masks import MaskCheck
from kv_transformers.rotary import with_ropes
from kv_transformers.support import cache_shape, expect_order
from kv_transformers.switch import install


class CompressedLayer(FreshLayer):
    """One layer as transformers sees it; everything is kept by the cache it belongs to."""

    def __init__(self, cache: "CompressedCache", index: int) -> None:
        """Stand for layer `index` of `cache`."""
        super().__init__(cache, index)
        self._cache = ref(cache)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the columns a mask has to cover: all that were seen.

        Raises:
            ValueError: there is no new column.
        """
        if query_length == 0:
            raise ValueError(_nothing_new(self.get_seq_length()))
        return super().get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Columns seen, padding and dropped tokens included: positions go on from here."""
        cache = self._cache()
        return 0 if cache is None else cache.runtime.columns


class CompressedCache(AttendingCache):
    """A KV cache that holds what a policy keeps, as the policy stores it.

    Pass it as `cache` to `generate` or to a forward pass; before transformers 5.24 that argument is
    called `past_key_values`. Attention runs over the pages; the cache never holds an uncompressed
    copy of what it stores. While tokens of a prompt arrive, a layer's own fresh keys and values
    exist as the model made them (those of all layers, for a policy that decides over all layers at
    once).

    Passes over the cache use an attention function of their own. The model's other calls, with
    other caches or none, use the implementation that it is configured for, as before;
    `kv_transformers.uninstall` takes the hooks away that see to this.
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
    ) -> None:
        """Make an empty cache for a model.

        Args:
            model: a decoder-only model of transformers whose layers attend to every token.
            policy: a policy or its text form, such as `snapkv:budget=1024+k8v4`.
            pages: size of a fixed pool of pages; None lets it grow as needed.
            page_tokens: tokens of the first tier in a page.
            budgets: a budget per sequence of the batch, None for the policy's own.
            backend: a name in `kv_attention.all_backends()`; `auto` is the fastest of those that
                can be used here.

        Raises:
            UnsupportedModelError: the model's attention is of another kind.
            ValueError: the policy's text, the policy itself or a budget is refused, the policy was
                calibrated with another model, the model is folded for another basis, or the backend
                cannot be used here.
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
        )
        self._device = model.device
        self._masks = MaskCheck(waits=self._device.type == "cpu")
        install(model)
        super().__init__(model, [CompressedLayer(self, i) for i in range(shape.layers)])

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "B Hq L D"],
        key: Float[Tensor, "B H L D"],
        value: Float[Tensor, "B Hv L Dv"],
        scale: float,
        valid: Bool[Tensor, "B L"] | None,
    ) -> Float[Tensor, "B L *out"]:
        """Attend over everything held and the fresh tokens, then store those.

        The output is by query head, or packed as a folded output projection reads it.
        """
        # What is stored outlives the pass, so none of it may be made as inference-mode tensors.
        with torch.inference_mode(False), torch.no_grad():
            if layer == 0:
                self._expect_same_device(query.device)
                self._expect_same_fold()
                self.runtime.begin(self._columns(query, valid))
            grouped = query.unflatten(1, (key.shape[1], -1))
            if self._fold is None or "values" not in self._fold.what:
                out = self.runtime.attend(layer, grouped, key, value, scale)
                return out.flatten(1, 2).transpose(1, 2).contiguous()
            packing = self._fold.packing[layer]
            out = self.runtime.attend(layer, grouped, key, packing.unpack(value), scale)
            return packing.pack(out)

    def expect_next(self, position: Int[Tensor, "_ L"], valid: Bool[Tensor, "B L"] | None) -> None:
        """Raise if the tokens of a pass do not come after those that are held.

        `generate` gives a used cache the end of whatever it was given, counted from its start.
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
        """Refuse a 2D mask that hides stored columns or shows padding; nothing is stored then.

        Raises:
            ValueError: it does.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._masks = self._masks.after(mask, self.runtime.held_columns, fresh)

    def _expect_same_device(self, found: torch.device) -> None:
        """Raise if the model was moved since the cache was made, or runs elsewhere than it lies."""
        if found != self._device:
            raise RuntimeError(
                f"the model attends on {found}, and this cache was made while it was on "
                f"{self._device}: it was moved since, or is offloaded; make a cache where it runs"
            )

    def _expect_same_fold(self) -> None:
        """Raise if projections were folded or restored since the cache was made."""
        model = self.model
        if model is not None and folded_by(model) is not self._fold:
            raise RuntimeError(
                "the model was folded or restored since this cache was made, so it would read "
                "other vectors than it holds; make a new cache"
            )

    @staticmethod
    def _columns(query: Tensor, valid: Bool[Tensor, "B L"] | None) -> Bool[Tensor, "B L"]:
        batch, _, length, _ = query.shape
        if valid is None:
            return torch.ones(batch, length, dtype=torch.bool, device=query.device)
        return valid.expand(batch, length)

    def memory(self) -> MemoryReport:
        """Bytes held, by name, and tokens kept per layer, sequence and KV head."""
        return self.runtime.memory()

    def reset(self) -> None:
        """Forget everything and give the memory back."""
        self.runtime.reset()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Let each beam go on from the beam it was chosen from."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Int[Tensor, " B2"]) -> None:
        """Keep only some sequences, in the order given."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence, copies side by side."""
        batch = self.runtime.sequences
        if batch is not None:
            self._select(torch.arange(batch).repeat_interleave(repeats))

    def _select(self, source: Int[Tensor, " B2"]) -> None:
        # As in `attend`: what is stored outlives the inference mode it may be called in.
        with torch.inference_mode(False), torch.no_grad():
            self.runtime.select(source.clone())

    @property
    def batch_size(self) -> int:
        """Sequences held, or -1 before the first pass."""
        batch = self.runtime.sequences
        return -1 if batch is None else batch

    @property
    def is_initialized(self) -> bool:
        """Whether a pass has begun."""
        return self.runtime.sequences is not None

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works, which it does where the policy keeps every token."""
        return self.runtime.rolls_back

    def crop(self, tokens_to_remove: int | Int[Tensor, ""]) -> None:
        """Remove the newest columns, given as a negative number; 0 does nothing.

        A sequence loses the tokens that it has in these columns: padding among them is no token.

        Raises:
            ValueError: the number is positive or larger than the columns held, or the policy cannot
                take tokens back; nothing has changed.
        """
        columns = int(tokens_to_remove)  # transformers 5.16 hands on a tensor of one number
        if not columns:
            return
        if columns > 0 and self.runtime.rolls_back:
            raise ValueError(_advice(columns, self.runtime.columns))
        with torch.inference_mode(False), torch.no_grad():
            self.runtime.roll_back(abs(columns))

    def __deepcopy__(self, memo: dict[int, object]) -> "CompressedCache":
        """Copy what is held, for the same model, into a pool of its own that is as large.

        Several answers may so go on from one prompt. The policy and the model are shared.

        Raises:
            RuntimeError: the forward pass before this did not finish.
        """
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self), runtime=deepcopy(self.runtime, memo))
        made.layers = [CompressedLayer(made, i) for i in range(len(self.layers))]
        return made

    def __copy__(self) -> NoReturn:
        """Refuse a copy that would hold the same pages.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "copy.copy(cache) would give two caches that write to the same pages; "
            "copy.deepcopy(cache) gives one with pages of its own"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, and so to be saved by `torch.save` or sent to another process.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "a CompressedCache cannot be pickled or saved: it belongs to a model in this process; "
            "save the token ids and the policy's text, and let the model read them into a new "
            "CompressedCache, or use copy.deepcopy(cache) for a copy in this process"
        )


_GO_ON = (
    "for another prompt call reset() on the cache or make a new one; to go on, give generate() the "
    "whole conversation, of which it reads what is new"
)


def _nothing_new(columns: int) -> str:
    """What is wrong with a pass over no column."""
    if not columns:
        return "the prompt is empty; give at least one sequence of at least one token"
    return (
        f"the cache holds {columns} columns of tokens, and the input has none after these: {_GO_ON}"
    )


def _other_prompt(held: int, place: int) -> str:
    """What is wrong with tokens that come before those that are held."""
    return (
        f"the cache holds {held} tokens of a sequence, and the input begins at position {place}, "
        f"not after them: {_GO_ON}"
    )


def _advice(tokens: int, columns: int) -> str:
    """What to call instead of `crop` with a positive number."""
    said = f"crop({tokens}) was called, and crop takes the columns to remove as a negative number"
    if tokens >= columns:
        return f"{said}; the cache holds {columns}, so there is nothing to remove to keep {tokens}"
    keep = f"crop({tokens - columns}) keeps the first {tokens} of the {columns} columns held"
    return f"{said}: {keep}, and crop({-tokens}) removes the last {tokens}"
