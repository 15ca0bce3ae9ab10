"""What is written down of a prompt under a policy: the JSON file of `kv-serve inspect`."""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from kv_eval.evaluate.report import SOME
from kv_runtime import Kind, Serving

DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"  # a place's number, in `Inspection.held`
NOT_HELD: Final = "."
LEVELS: Final = 10  # shades between what no head keeps and what all keep
Count = Annotated[int, msgspec.Meta(ge=0)]
_BESIDE: Final = {
    "unfilled_bytes": "places in pages without a token",
    "spare_bytes": "free pages",
    "table_bytes": "page tables",
    "basis_bytes": "maps into the basis",
}


def level(share: float) -> int:
    """Give the shade of a share: the first and the last are those of none and of all alone."""
    if share in (0.0, 1.0):
        return LEVELS * int(share)
    return min(LEVELS - 1, max(1, int(LEVELS * share + 0.5)))


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """A way in which tokens are held.

    Attributes:
        name: its format's, such as `k8v4`.
        kind: `tier`; `waiting`, raw until a block of the tier before is full; or `window`, the
            newest tokens, raw.
        tokens: held there, over all layers and heads.
        bytes: that these take, with their scores and positions; of a window all of it.
    """

    name: str
    kind: Kind
    tokens: Count
    bytes: Count


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A token of the prompt.

    Attributes:
        id: in the model's vocabulary.
        text: the part of the prompt that it stands for; joined, these are the prompt.
        name: what is shown of a token without text.
        held: for each place, how many heads of all layers hold it there; the others hold it not.
    """

    id: Count
    text: str
    name: str = ""
    held: tuple[Count, ...]

    @property
    def shown(self) -> str:
        """Its text, or its name where it has none."""
        return self.text or self.name


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy kept of a prompt.

    Heads are KV heads as they are stored: a basis may store several together as one.

    Attributes:
        model: the name that it was asked for by.
        policy: its canonical text.
        attention: what attended.
        versions: of Python and of the packages that this may depend on.
        layers: of the model.
        heads: that are stored of each layer.
        kv_bytes: held after the prompt.
        full_bytes: that an uncompressed cache takes for the same tokens.
        memory: what `kv_bytes` is the sum of, by name.
        places: ways in which tokens are held.
        tokens: of the prompt, in order.
        kept: tokens held, for each layer, for each of its heads.
        held: for each layer, for each of its heads a text of a character per token: the number of
            the place where the token is, counted from 0 (then `a` is 10), or `.`: it is not held.
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
    def streams(self) -> int:
        """Heads of all layers together: as many at most hold a token."""
        return self.layers * self.heads

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of an uncompressed cache."""
        return self.kv_bytes / self.full_bytes

    @property
    def missing(self) -> int:
        """How often a head does not hold a token."""
        return self.streams * len(self.tokens) - sum(place.tokens for place in self.places)

    @property
    def beside(self) -> dict[str, int]:
        """Bytes that are no token's, nor of the raw window, by what they are."""
        return {words: self.memory[name] for name, words in _BESIDE.items()}

    def share(self, token: Token, place: int | None = None) -> float:
        """The share of all heads that hold a token, anywhere or in one place."""
        return (sum(token.held) if place is None else token.held[place]) / self.streams

    def facts(self, token: Token) -> str:
        """Say which share of all heads holds a token where."""
        counts = [*token.held, self.streams - sum(token.held)]
        names = [*(place.name for place in self.places), "not kept"]
        return ", ".join(
            f"{name} {count / self.streams:.1%}"
            for name, count in zip(names, counts, strict=True)
            if count
        )

    def encoded(self) -> bytes:
        """Give the JSON file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
