"""Composition of policies that supply different facets."""

from dataclasses import dataclass
from functools import reduce
from typing import Final, Literal

from kv_policy.codec import TokenFormat
from kv_policy.complete import complete
from kv_policy.contract import Basis, Capabilities, Formats, KVPolicy, Selector
from kv_policy.merged_selector import MergedSelector
from kv_policy.part import Part
from kv_policy.raw import Raw
from kv_policy.reading import PageReading
from kv_policy.shape import CacheShape
from kv_policy.sorted_selector import SortedSelector

Facet = Literal["basis", "selector", "formats", "reading"]
FACETS: Final[tuple[Facet, ...]] = ("basis", "selector", "formats", "reading")


class CompositionError(ValueError):
    """Two policies cannot be composed; the message names both."""


@dataclass(frozen=True, slots=True)
class Composed:
    """Several policies as one. Made by `compose`, which checks and orders them."""

    parts: tuple[KVPolicy, ...]

    @property
    def selector(self) -> Selector | None:
        """The selector of the part that has one, or the combination of two."""
        return _together([p.selector for p in self.parts if p.selector is not None])

    @property
    def formats(self) -> Formats | None:
        """The formats of the part that has them."""
        return next((p.formats for p in self.parts if p.formats is not None), None)

    @property
    def basis(self) -> Basis | None:
        """The basis of the part that has one."""
        return next((p.basis for p in self.parts if p.basis is not None), None)

    @property
    def reading(self) -> PageReading | None:
        """The reading of the part that limits it."""
        return next((p.reading for p in self.parts if p.reading is not None), None)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of all parts combined."""
        return reduce(lambda a, b: a & b, (p.capabilities for p in self.parts))

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model that the parts were calibrated with; `compose` allows one."""
        return next((p.fitted_to for p in self.parts if p.fitted_to is not None), None)

    def __str__(self) -> str:
        """Join the texts of the parts with `+`."""
        return "+".join(str(p) for p in self.parts)


def compose(*policies: KVPolicy) -> KVPolicy:
    """Compose policies into one; their order does not matter.

    Two selectors are allowed where one evicts and the other sorts the kept tokens into tiers, such
    as `kv-compress:keep=25%+leankv`, or merges those that are dropped, such as
    `snapkv:budget=1024+d2o`.

    Raises:
        CompositionError: two policies supply the same facet or were calibrated with different
            models, one supplies no facet, one plans chunks of prompts and another sorts into tiers
            or merges, one drops tokens at decode steps and another merges, a policy that merges
            for another has a budget of its own, the number of tiers of the selector differs from
            the number of formats, or one limits the pages that are read and another observes,
            evicts or moves tokens in decode steps.
    """
    parts = [q for p in policies for q in (p.parts if isinstance(p, Composed) else (p,))]
    if not parts:
        raise CompositionError("nothing to compose; name at least one policy, for example k8v4")
    for facet in FACETS:
        suppliers = [p for p in parts if getattr(p, facet) is not None]
        if len(suppliers) > 1 and not (facet == "selector" and _get_along(suppliers)):
            raise CompositionError(
                f"{suppliers[0]} and {suppliers[1]} both define {_MEANING[facet]}; keep one of them"
            )
    for part in parts:
        if all(getattr(part, facet) is None for facet in FACETS):
            raise CompositionError(
                f"{part} supplies no selector, no formats, no basis and no reading"
            )
    fitted = [p for p in parts if p.fitted_to is not None]
    if len({p.fitted_to for p in fitted}) > 1:
        raise CompositionError(
            f"{fitted[0]} and {fitted[1]} were calibrated with different models; calibrate both "
            "with the model to be served"
        )
    joined = parts[0] if len(parts) == 1 else Composed(tuple(sorted(parts, key=_order)))
    _check_tiers(joined, parts)
    _check_reading(joined, parts)
    return joined


_MEANING: Final[dict[Facet, str]] = {
    "basis": "the basis in which vectors are stored",
    "selector": "which tokens are kept",
    "formats": "how tokens are stored",
    "reading": "which pages are read",
}


def _get_along(parts: list[KVPolicy]) -> bool:
    """Whether one part evicts, after prompts and plans, and the other sorts the kept tokens."""
    if len(parts) != 2:
        return False
    if [_merges(part) for part in parts].count(True) == 1:
        merger, other = sorted(parts, key=_merges, reverse=True)
        return _expect_merged(merger, other)
    for part in parts if any(map(_sorts, parts)) else ():
        if part.selector is not None and complete(part.selector).plans_chunks:
            raise CompositionError(
                f"{part} plans after each chunk of a prompt, but tokens are sorted into tiers by "
                "their rank in the whole prompt; omit one of the two"
            )
    return sorted(map(_sorts, parts)) == [False, True] and all(
        p.selector is not None and (_sorts(p) or complete(p.selector).decode == "grow")
        for p in parts
    )


def _expect_merged(merger: KVPolicy, other: KVPolicy) -> bool:
    """Return True if one part merges what plans of the other drop.

    Raises:
        CompositionError: the other drops tokens without a plan of a whole sequence, or the merger
            has a budget, which has no effect.
    """
    assert other.selector is not None
    selector = complete(other.selector)
    drops = "after each chunk of a prompt" if selector.plans_chunks else "at decode steps"
    if selector.plans_chunks or selector.decode == "step":
        raise CompositionError(
            f"{merger} merges tokens that a plan of a whole sequence drops, but {other} drops "
            f"tokens {drops}; omit one of the two"
        )
    if isinstance(merger, Part):
        own = {parameter.name: parameter.default for parameter in merger.parameters()}
        for name in merger.amounts:
            if str(getattr(merger, name)) != own[name]:
                raise CompositionError(
                    f"{merger} merges what {other} drops, so its own {name} has no effect; omit it"
                )
    return True


def _merges(part: KVPolicy) -> bool:
    return part.selector is not None and complete(part.selector).merge is not None


def _sorts(part: KVPolicy) -> bool:
    return part.selector is not None and complete(part.selector).tiers > 1


def _together(selectors: list[Selector]) -> Selector | None:
    if len(selectors) < 2:
        return selectors[0] if selectors else None
    first, second = sorted(map(complete, selectors), key=lambda s: (s.tiers, s.merge is not None))
    if second.tiers == 1 or (second.merge is not None and first.merge is None):
        return MergedSelector(first, second)
    return SortedSelector(first.selector, second.selector)


def _order(part: KVPolicy) -> tuple[int, bool]:
    first = next(i for i, facet in enumerate(FACETS) if getattr(part, facet) is not None)
    return first, _sorts(part) or _merges(part)


def _check_tiers(joined: KVPolicy, parts: list[KVPolicy]) -> None:
    sent = 1 if joined.selector is None else complete(joined.selector).tiers
    stored = joined.formats.tiers if joined.formats else 1
    if sent != stored:
        chooser = next((p for p in parts if p.selector is not None), "keeping every token")
        storer = next((p for p in parts if p.formats is not None), "raw storage")
        raise CompositionError(
            f"{chooser} sends tokens to {sent} tier(s) and {storer} has formats for {stored}; "
            "both numbers must be equal"
        )


def tier_formats(policy: KVPolicy, shape: CacheShape) -> tuple[TokenFormat, ...]:
    """Return the format of each tier of a policy; raw if the policy has no formats.

    If values are in keys (`CacheShape.value_in_key`), a token is one vector, in the key's format.
    """
    formats: Formats = policy.formats if policy.formats is not None else Raw()
    bound = formats.bind(shape)
    if not shape.value_in_key:
        return bound
    return tuple(form.values_in_keys(shape.value_dim) for form in bound)


def _check_reading(joined: KVPolicy, parts: list[KVPolicy]) -> None:
    if joined.reading is None or joined.selector is None:
        return
    reader = next(p for p in parts if p.reading is not None)
    selector = complete(joined.selector)
    chooser = next(p for p in parts if p.selector is not None)
    why = None
    if selector.observe.generated:
        why = "observes the attention of generated queries to every stored token"
    elif selector.decode == "step":
        why = "evicts or moves a stored token in each decode step, which changes its page"
    elif selector.tiers > 1:
        why = (
            f"sorts tokens into {selector.tiers} tiers, and the pages of one of them can be ranked"
        )
    if why is not None:
        raise CompositionError(
            f"{reader} reads some pages in a decode step, but {chooser} {why}; omit one of the "
            "two, or use a selector that decides after prompts alone, such as kv-compress or snapkv"
        )
