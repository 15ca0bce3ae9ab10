"""Random table rows through the cache under selectors, beside all that they ever held."""

import torch
from torch import Tensor

from kv_policy import CacheShape, KVPolicy, parse
from kv_runtime.cache import PolicyCache
from tiered_policies import SHAPE


def ragged(*lengths: int) -> Tensor:
    width = max(lengths)
    return torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]


def one(sequences: int = 2) -> Tensor:
    return torch.ones(sequences, 1, dtype=torch.bool)


class World:
    """A batch of random table rows, of which everything is remembered, beside the cache."""

    def __init__(
        self,
        policy: KVPolicy,
        sequences: int = 2,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # by layer, KV head and query head of its group
        shape: CacheShape = SHAPE,
        share: float | None = None,  # of the columns that each query chooses; None: all
        **options: object,
    ) -> None:
        self.softcap, self.sinks = softcap, sinks
        self.share, self.columns = share, torch.zeros(sequences, 0, dtype=torch.bool)
        self.lost = 0  # queries of a head whose chosen tokens were all dropped
        self.shape = shape
        self.cache = PolicyCache(policy, shape, page_tokens=4, **options)
        self.sequences = sequences
        lead = (SHAPE.layers, sequences, SHAPE.kv_heads, 400)
        self.key, self.value = torch.randn(*lead, 6), torch.randn(*lead, 5)
        if shape.value_in_key:
            self.value = self.key[..., :5]
        self.basis = policy.basis
        self.seen = torch.zeros(sequences, dtype=torch.long)

    def seen_as(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values as a policy's basis lets attention see them."""
        if self.basis is None:
            return self.key[layer], self.value[layer]
        maps = self.basis.bind(layer, SHAPE)
        found = []
        for basis, x in ((maps.key, self.key[layer]), (maps.value, self.value[layer])):
            dual = basis.matrix if basis.dual is None else basis.dual
            shift = torch.zeros(()) if basis.shift is None else basis.shift[:, None]
            x = x - shift
            members = basis.matrix.unflatten(0, (-1, basis.together))
            stored = torch.einsum("bstld,stdr->bslr", x.unflatten(1, members.shape[:2]), members)
            duals = dual.unflatten(0, (-1, basis.together))
            found.append(torch.einsum("bslr,stdr->bstld", stored, duals).flatten(1, 2) + shift)
        return found[0], found[1]

    def kept(self, layer: int) -> Tensor:
        """[B, H, 400] bool: the positions the layer holds, each once."""
        batch, heads = self.cache.batch, self.cache.layout.shape.kv_heads
        count = torch.zeros(self.sequences, heads, 401, dtype=torch.long)
        if self.cache.policy.selector is None:  # everything; pages hold no positions
            everything = torch.arange(400) < self.seen[:, None]
            return everything[:, None].expand(-1, SHAPE.kv_heads, -1)
        if batch is None:
            return count[..., :400].repeat_interleave(SHAPE.kv_heads // heads, 1) > 0
        for store in batch.stores:
            read = store.read(batch.table_rows(slice(layer, layer + 1)))
            place = read.position.long().masked_fill(~read.held, 400)
            count.scatter_add_(
                -1,
                place.view(self.sequences, heads, -1),
                torch.ones_like(place.view(self.sequences, heads, -1)),
            )
        if batch.window is not None:
            place = batch.window.position.masked_fill(batch.window.position < 0, 400)
            place = place[:, None].expand(-1, heads, -1)
            count.scatter_add_(-1, place, torch.ones_like(place))
        assert count[..., :400].max() <= 1
        return count[..., :400].repeat_interleave(SHAPE.kv_heads // heads, 1) > 0

    def forward(self, valid: Tensor, *, more: bool = False) -> None:
        """One pass over new columns, checked layer by layer."""
        self.cache.begin(valid, remaining=int(more))
        width = valid.shape[1]
        if self.share is not None:
            self.columns = torch.cat((self.columns, valid), 1)
        place = (self.seen[:, None] + valid.long().cumsum(-1) - 1).masked_fill(~valid, 399)
        total = self.seen + valid.sum(-1)
        for layer in range(SHAPE.layers):
            before = self.kept(layer)
            index = place[:, None, :, None].expand(-1, 2, -1, 6)
            key = self.key[layer].gather(2, index)
            value = self.value[layer].gather(2, index[..., :5])
            if self.shape.value_in_key:
                value = key[..., :5]
            query = torch.randn(self.sequences, 2, 2, width, 6)
            sinks = None if self.sinks is None else self.sinks[layer]
            chosen = self.chosen(width)
            out = self.cache.attend(
                layer, query, key, value, 0.4, self.softcap, sinks, chosen=chosen
            )
            fresh = torch.arange(400)[None] >= self.seen[:, None]
            fresh &= torch.arange(400)[None] < total[:, None]
            visible = before[:, :, None] | fresh[:, None, None]
            causal = torch.arange(400)[None, None] <= place[..., None]
            mask = visible & causal[:, None]  # B H L 400
            if chosen is not None:
                mine = mask & self.by_position(chosen)[:, None]
                some = mine.any(-1, keepdim=True)
                self.lost += int((~some[..., 0] & valid[:, None]).sum())
                mask = torch.where(some, mine, mask)
            mask = mask[:, :, None]
            keys, values = self.seen_as(layer)
            logits = (query @ keys[:, :, None].mT) * 0.4
            if self.softcap is not None:
                logits = self.softcap * (logits / self.softcap).tanh()
            logits = logits.masked_fill(~mask, -torch.inf)
            if sinks is not None:  # as a last column
                column = sinks[None, :, :, None, None].expand(*logits.shape[:-1], 1)
                logits = torch.cat((logits, column), -1)
            want = logits.softmax(-1)[..., :400] @ values[:, :, None]
            real = valid[:, None, None, :].expand(out.shape[:-1])
            torch.testing.assert_close(out[real], want[real], rtol=1e-4, atol=1e-5)
        self.seen = total
        self.cache.batch.pool.check(self.cache.batch.pages())

    def chosen(self, width: int) -> Tensor | None:
        """Random columns for each query: padding and later ones, too."""
        shape = self.sequences, width, self.columns.shape[1]
        return None if self.share is None else torch.rand(shape) < self.share

    def by_position(self, chosen: Tensor) -> Tensor:
        """[B, L, 400] bool: the chosen positions."""
        found = torch.zeros(*chosen.shape[:2], 400, dtype=torch.bool)
        for b, held in enumerate(self.columns):
            mine = chosen[b][:, held]
            found[b, :, : mine.shape[1]] = mine
        return found

    def go_on(self, steps: int) -> None:
        """Let every sequence take so many steps."""
        for _ in range(steps):
            self.forward(one(self.sequences))


def filled(policy: str, sequences: list[int], rows: slice, steps: int = 0) -> PolicyCache:
    """A cache that read prompts of these lengths and some steps; only `rows` are in the batch."""
    generator = torch.Generator().manual_seed(5)
    width = max(sequences)
    lead = (SHAPE.layers, len(sequences), SHAPE.kv_heads)
    query = torch.randn(*lead, 2, width, 6, generator=generator)[:, rows]
    key = torch.randn(*lead, width, 6, generator=generator)[:, rows]
    value = torch.randn(*lead, width, 5, generator=generator)[:, rows]
    cache = PolicyCache(parse(policy), SHAPE, page_tokens=4)
    cache.begin(ragged(*sequences)[rows])
    for layer in range(SHAPE.layers):
        cache.attend(layer, query[layer], key[layer], value[layer], 0.4)
    for _ in range(steps):
        query = torch.randn(*lead, 2, 1, 6, generator=generator)[:, rows]
        key = torch.randn(*lead, 1, 6, generator=generator)[:, rows]
        value = torch.randn(*lead, 1, 5, generator=generator)[:, rows]
        cache.begin(one(len(ragged(*sequences)[rows])))
        for layer in range(SHAPE.layers):
            cache.attend(layer, query[layer], key[layer], value[layer], 0.4)
    return cache


def places(cache: PolicyCache, sequence: int) -> list[list[list[int]]]:
    """The positions that each head of each layer holds of a sequence, tier by tier."""
    found = []
    for store in cache.batch.stores:
        read = store.read(store.table_rows())
        place = read.position.masked_fill(~read.held, -1)
        rows = place.unflatten(0, (SHAPE.layers, -1, SHAPE.kv_heads))[:, sequence].flatten(0, 1)
        found.append([sorted(p for p in row.tolist() if p >= 0) for row in rows])
    return found
