"""The policies that a search tries: what the installed packages offer, combined."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final

from kv_policy import BrokenPolicyError, KVPolicy, Part, Registry, compose

SHARES: Final = ("50%", "25%", "12.5%")  # of the tokens, for methods with an amount
ROTATED: Final = ("k4v4", "k4v2")  # formats with few bits, which a basis without a file helps


def grid(shares: Sequence[str] = SHARES, registry: Registry | None = None) -> tuple[str, ...]:
    """Return the text forms of all combinations, in canonical form.

    They are every format with its variants; every selector, at each share of the tokens if it takes
    one, with each of these formats or with its own; and every basis that needs no file, with
    formats of few bits. Which parameters are varied, a part says itself (`Part.variants`). Left out
    are policies that need a file of a calibration, and those that cannot be combined.

    Args:
        shares: of the tokens seen, as text.
        registry: where parts are found; None: the installed ones.
    """
    found = Registry.scan() if registry is None else registry
    classes = [part for name in found.claims for part in _loaded(found, name)]

    def having(*facets: str) -> list[Part]:
        return [
            part for each in classes if each.facets() == facets for part in _variants(each, shares)
        ]

    formats, whole = having("formats"), having("selector", "formats")
    rotated = [part for name in ROTATED if name in found.claims for part in _loaded(found, name)]
    few = [part.from_text({}) for part in rotated]
    pairs = (*product(having("selector"), formats), *product(having("basis"), few))
    alone = ((part,) for part in (*formats, *whole))
    return tuple(dict.fromkeys(spec for parts in (*alone, *pairs) for spec in _composed(parts)))


def _loaded(registry: Registry, name: str) -> Iterator[type[Part]]:
    """Yield a part, unless it is broken: `kv-serve policies` says why."""
    try:
        yield registry.load(name)
    except BrokenPolicyError:
        return


def _variants(part: type[Part], shares: Sequence[str]) -> Iterator[Part]:
    """Yield a part with each of its variants, at each share if it has an amount."""
    amounts = [{"keep": share} for share in shares] if part.amounts else [{}]
    for amount, variant in product(amounts, part.variants):
        pairs = (each.split("=", 1) for each in variant.split(",") if each)
        try:
            yield part.from_text({**amount, **{key: value for key, value in pairs}})
        except ValueError:
            continue


def _composed(parts: Sequence[KVPolicy]) -> Iterator[str]:
    try:
        yield str(compose(*parts))
    except ValueError:
        return
