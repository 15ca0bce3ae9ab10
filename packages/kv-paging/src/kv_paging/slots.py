"""Tokens by slot, in many streams at once and without waiting: for who knows what slots hold."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kv_paging.moves import Segment, take
from kv_paging.store import TokenStore
from kv_paging.tokens import BOTH, Stored, Vectors, read_tokens, write_tokens


def read_slots(
    store: TokenStore,
    streams: Int[Tensor, " S"],
    slot: Int[Tensor, "S L"],
    vectors: Vectors = BOTH,
) -> Stored:
    """Read the tokens in slots of streams; unlike `TokenStore.fetch` it checks nothing.

    Args:
        store: of a format in which every token stands alone.
        streams: which streams; one may be named again.
        slot: of each stream, slots before its end.
        vectors: what to decode.
    """
    page, row = store._place(streams[:, None].expand_as(slot), slot)

    def take_each(segment: Segment) -> Tensor:
        return take(store.pool.data, segment, page, row)

    return read_tokens(store.layout, slot >= 0, take_each, vectors)


def write_slots(
    store: TokenStore,
    streams: Int[Tensor, " S"],
    slot: Int[Tensor, "S L"],
    some: Bool[Tensor, "S L"],
    key: Float[Tensor, "S L D"],
    value: Float[Tensor, "S L Dv"],
    score: Float[Tensor, "S L"] | None = None,
    position: Int[Tensor, "S L"] | None = None,
) -> None:
    """Overwrite the tokens in the marked slots; unlike `TokenStore.replace` it checks nothing.

    Args:
        store: of a format in which every token stands alone.
        streams: which streams.
        slot: of each stream, slots before its end, those marked each once.
        some: which to write; the others go to the pool's scratch page.
        key: of the tokens.
        value: of the tokens.
        score: of the tokens; None leaves those that stand there.
        position: of the tokens; None leaves those that stand there.
    """
    page, row = store._place(streams[:, None].expand_as(slot), slot)
    write_tokens(
        store.pool.padded,
        store.layout,
        page.where(some, store.pool.capacity).flatten(),
        row.flatten(),
        key.flatten(0, 1),
        value.flatten(0, 1),
        None if score is None else score.flatten(),
        None if position is None else position.flatten(),
    )
