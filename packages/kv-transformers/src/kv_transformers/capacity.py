"""The bytes that a request holds under a policy, from a model's configuration alone."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kv_policy import CacheShape, KVPolicy
from kv_policy.pages import bound_bytes
from kv_runtime import Account, Bases, Layout, check_basis, chunk_budget, request_pages
from kv_transformers.layers import LayerCache, layer_caches
from kv_transformers.support import LayerSizes, stored_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGE_TOKENS: Final = 16
LIMITS: Final = ("sliding_window", "attention_chunk_size")  # of layers that hold the newest tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a request of `context` tokens holds, in bytes.

    Attributes:
        context: tokens of the request.
        kept_bytes: keys and values of the layers of full attention, once the prompt is compressed.
        prompt_bytes: the same while the prompt is prefilled, which is never less.
        other_bytes: keys and values of layers with a window, which no policy stores.
    """

    context: int
    kept_bytes: int
    prompt_bytes: int
    other_bytes: int

    @property
    def request_bytes(self) -> int:
        """Bytes that the request holds in all layers."""
        return self.kept_bytes + self.other_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of the request over its tokens."""
        return self.request_bytes / self.context

    @property
    def least_bytes(self) -> int:
        """Bytes that one request needs, during its prefill."""
        return self.prompt_bytes + self.other_bytes

    def requests(self, nbytes: int) -> int:
        """Return how many requests fit into `nbytes`, of which one is being prefilled."""
        spare = nbytes - self.least_bytes
        return 0 if spare < 0 else 1 + spare // self.request_bytes

    def tokens(self, nbytes: int) -> int:
        """Return how many tokens of such requests fit into `nbytes`."""
        return int(nbytes / self.token_bytes)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a model's layers cache.

    Attributes:
        shape: of the layers that a policy stores.
        windows: the newest tokens that a layer with a window holds, and its bytes per token; by
            layer.
        states: layers that keep a state of fixed size, whose bytes are not counted.
        weight_bytes: bytes of the model's parameters.
    """

    shape: CacheShape
    windows: tuple[tuple[int, int], ...]
    states: int
    weight_bytes: int

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "ModelMemory":
        """Read the sizes of a model, whose weights may be on the meta device.

        Raises:
            UnsupportedModelError: a compressed cache does not support the model.
        """
        shape = stored_shape(model)
        config = model.config.get_text_config(decoder=True)
        caches = layer_caches(config)
        windows = []
        for layer, cache in zip(config.per_layer_config, caches, strict=True):
            limit = _limit(cache)
            if cache.index is None and not cache.is_reader and limit is not None:
                token = LayerSizes.of(layer).token_numbers * shape.dtype.itemsize
                windows.append((limit, token))
        held = sum(each.keeps_own and not each.is_reader for each in caches) - len(windows)
        weights = sum(each.numel() * each.element_size() for each in model.parameters())
        return cls(shape, tuple(windows), held, weights)

    def stock(self, context: int) -> Capacity:
        """Return the bytes of a request in an uncompressed cache."""
        full = context * self.shape.token_bytes
        return Capacity(context, full, full, self._others(context))

    def under(self, policy: KVPolicy, context: int) -> Capacity:
        """Return the bytes of a request under a policy, in whole pages.

        They are those that a scheduler reserves, and bounds or codes of keys in pages, if the
        policy limits the pages that are read. A threshold, whose kept tokens depend on the text,
        counts as if all were kept.

        Raises:
            ValueError: the policy does not fit the model's shape.
        """
        shape, basis = self.shape, policy.basis
        check_basis(policy, shape)
        bases = None if basis is None else Bases.of(basis, shape, torch.device("cpu"))
        layout = Layout.of(policy, shape, bases, PAGE_TOKENS)
        account = Account.of(layout, PAGE_TOKENS)
        kept, read = request_pages(policy, account, context), account.pages(context)
        if chunk_budget(policy) is not None:
            read = kept
        page = account.page_bytes
        pages, bounds = layout.pages[0][0], 0
        if policy.reading is not None:
            dim = pages.format.key.dim
            bounds = kept * bound_bytes(dim, pages.tokens, policy.reading.coded)
        prompt = max(kept, read) * page + bounds
        return Capacity(context, kept * page + bounds, prompt, self._others(context))

    def _others(self, context: int) -> int:
        return sum(min(context, limit) * token for limit, token in self.windows)


def _limit(cache: LayerCache) -> int | None:
    """Return how many of the newest tokens a layer of transformers' own holds; None: a state."""
    found = (cache.options.get(name) for name in LIMITS)
    return next((each for each in found if isinstance(each, int)), None)
