"""The JSON file of `kv-serve inspect`: the stored tokens of a prompt under a policy."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from kv_eval.evaluate.report import SOME
from kv_runtime import Kind, Serving

DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"  # index of a place, in `Inspection.held`
NOT_HELD: Final = "."
LEVELS: Final = 10  # shades from no head to all heads
Count = Annotated[int, msgspec.Meta(ge=0)]
_BESIDE: Final = {
    "unfilled_bytes": "places in pages without a token",
    "spare_bytes": "free pages",
    "table_bytes": "page tables",
    "basis_bytes": "maps into the basis",
    "other_bytes": "caches of layers that the policy does not store",
}


def level(share: float) -> int:
    """Return the shade of a share; the first and last are only for 0 and 1."""
    if share in (0.0, 1.0):
        return LEVELS * int(share)
    return min(LEVELS - 1, max(1, int(LEVELS * share + 0.5)))


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """A place where tokens are stored.

    Attributes:
        name: its format, such as `k8v4`.
        kind: `tier`; `waiting`, raw until a block of the previous tier is full; or `window`, the
            newest tokens, raw.
        tokens: stored there, over all layers and heads.
        bytes: of these tokens, with scores and positions; for a window, its whole size.
    """

    name: str
    kind: Kind
    tokens: Count
    bytes: Count


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token of the prompt.

    Attributes:
        id: its id in the model's vocabulary.
        text: its part of the prompt; joined, these are the prompt.
        name: shown for a token without text.
        held: number of heads over all layers that store the token, per place.
    """

    id: Count
    text: str
    name: str = ""
    held: tuple[Count, ...]

    @property
    def shown(self) -> str:
        """The text, or the name if the text is empty."""
        return self.text or self.name


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """The stored tokens of a prompt under a policy.

    Heads are stored KV heads: a basis may store several together as one.

    Attributes:
        model: the name used to load it.
        policy: its canonical text.
        attention: the attention backend.
        versions: of Python and of the packages that results depend on.
        layers: of the model.
        heads: stored heads per layer.
        kv_bytes: cache bytes after the prompt.
        full_bytes: of an uncompressed cache for the same tokens.
        memory: the parts of `kv_bytes`, by name.
        places: where tokens are stored.
        tokens: of the prompt, in order.
        kept: stored tokens, for each layer, for each of its heads.
        held: for each layer, for each of its heads a text with one character per token: the index
            of the token's place (digits, then letters from `a` for 10), or `.` if not stored.
    """

    model: str
    policy: str
    attention: Serving
    versions: Mapping[str, str]
    layers: Annotated[int, msgspec.Meta(ge=1)]
    heads: Annotated[int, msgspec.Meta(ge=1)]
    kv_bytes: Count
    full_bytes: Count
    memory: Mapping[str, Count]
    places: tuple[Spot, ...]
    tokens: tuple[Token, ...]
    kept: Annotated[tuple[tuple[Count, ...], ...], SOME]
    held: Annotated[tuple[tuple[str, ...], ...], SOME]

    @property
    def all_heads(self) -> int:
        """Heads over all layers: the maximum number of heads that hold a token."""
        return self.layers * self.heads

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of an uncompressed cache."""
        return self.kv_bytes / self.full_bytes

    @property
    def missing(self) -> int:
        """Number of (head, token) pairs that are not stored."""
        return self.all_heads * len(self.tokens) - sum(place.tokens for place in self.places)

    @property
    def beside(self) -> dict[str, int]:
        """Bytes of neither tokens nor the raw window, by name."""
        pairs = ((words, self.memory.get(name)) for name, words in _BESIDE.items())
        return {words: nbytes for words, nbytes in pairs if nbytes is not None}

    def share(self, token: Token, place: int | None = None) -> float:
        """Return the share of all heads that hold a token, anywhere or in one place."""
        return (sum(token.held) if place is None else token.held[place]) / self.all_heads

    def facts(self, token: Token) -> str:
        """Return the shares of all heads that hold a token, by place."""
        counts = [*token.held, self.all_heads - sum(token.held)]
        names = [*(place.name for place in self.places), "not kept"]
        return ", ".join(
            f"{name} {count / self.all_heads:.1%}"
            for name, count in zip(names, counts, strict=True)
            if count
        )

    def encoded(self) -> bytes:
        """Return the JSON file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
