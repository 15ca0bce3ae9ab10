"""The laws of a policy."""

from typing import Final

import torch

from kv_policy.basis import HeadBasis, LayerBasis
from kv_policy.codec import TokenFormat
from kv_policy.complete import complete
from kv_policy.compose import Composed
from kv_policy.contract import Basis, Capabilities, Formats, KVPolicy, Selector
from kv_policy.part import Part, split
from kv_policy.reading import PageReading
from kv_policy.registry import installed
from kv_policy.same_shape import keeps_shape
from kv_policy.shape import CacheShape, Rope
from kv_policy.spec import parse, read
from kv_policy.testing.codecs import check_codec
from kv_policy.testing.laws import equal, law, works
from kv_policy.testing.selectors import check_selector
from kv_policy.testing.views import shard

_SHAPE: Final = CacheShape(
    layers=2,
    kv_heads=4,
    group=3,
    key_dim=64,
    value_dim=32,
    rope=Rope(tuple(10000 ** (-i / 32) for i in range(32))),
)


def check_policy(policy: KVPolicy, shape: CacheShape = _SHAPE) -> None:
    """Check a policy against the contract.

    Its text form parses back to an equal policy. Its selector is pure, treats every sequence
    independently, ignores padding, keeps protected tokens, stays within the budget and never moves
    a token to an earlier tier; its formats match its number of tiers, and their codecs pass
    `check_codec`; its basis fits the heads; it reads at least a page of a head that holds some; and
    its capabilities are true as far as they can be tested.

    Args:
        policy: the policy, alone or composed.
        shape: the cache shape to test with; set it if the policy is made for particular sizes.

    Raises:
        AssertionError: a law is violated; the message names it.
    """
    law(isinstance(policy, KVPolicy), f"{policy!r} lacks a member of the KVPolicy protocol")
    law(isinstance(policy.capabilities, Capabilities), "capabilities must be a Capabilities")
    selector, formats, basis = policy.selector, policy.formats, policy.basis
    law(
        any(x is not None for x in (selector, formats, basis, policy.reading)),
        f"{policy} supplies no selector, no formats, no basis and no reading",
    )
    if selector is not None:
        law(isinstance(selector, Selector), f"the selector of {policy} lacks a member of Selector")
        check_selector(selector, policy.capabilities, shape)
    if formats is not None:
        law(isinstance(formats, Formats), f"the formats of {policy} lack a member of Formats")
        _check_formats(formats, shape)
    if basis is not None:
        law(isinstance(basis, Basis), f"the basis of {policy} lacks a member of Basis")
        _check_basis(basis, policy.capabilities, shape)
    if policy.reading is not None:
        _check_reading(policy.reading)
    _check_text(policy)


def _check_text(policy: KVPolicy) -> None:
    text = str(policy)
    for part in policy.parts if isinstance(policy, Composed) else (policy,):
        name, options = works(f"{part} cannot be parsed", read, str(part))
        if isinstance(part, Part):
            law(name == part.name, f"{part} does not start with its name, {part.name}")
            again = works(f"the parameters of {part} cannot be parsed", part.from_text, options)
            law(again == part, f"parsing {part} returns {again!r}, which is not equal to {part!r}")
    selector = policy.selector
    whole = selector is None or complete(selector).tiers == 1 or policy.formats is not None
    parts = policy.parts if isinstance(policy, Composed) else (policy,)
    known = installed()
    extra = [type(p) for p in parts if isinstance(p, Part) and p.name not in known]
    names = {*known, *(each.name for each in extra)}
    if whole and {read(piece)[0] for piece in split(text, "+")} <= names:
        parsed = works(f"the text {text} is refused", parse, text, extra)
        law(parsed == policy, f"parsing {text} returns {parsed!r}, not equal to {policy!r}")
        law(str(parsed) == text, f"parsing {text} returns a policy with the text {parsed}")


def _check_formats(formats: Formats, shape: CacheShape) -> None:
    law(formats.tiers >= 1, f"formats has {formats.tiers} tiers; it needs at least 1")
    law(formats.window >= 0, f"the raw window is {formats.window} tokens; it must be 0 or more")
    bound = works(f"bind failed for {shape}", formats.bind, shape)
    law(
        isinstance(bound, tuple) and all(isinstance(tier, TokenFormat) for tier in bound),
        f"bind returns {bound!r}; it must return a tuple of TokenFormat",
    )
    law(
        len(bound) == formats.tiers,
        f"bind returns {len(bound)} formats and tiers is {formats.tiers}",
    )
    for tier in bound:
        law(
            (tier.key.dim, tier.value.dim) == (shape.key_dim, shape.value_dim),
            f"bind returns codecs for {tier.key.dim} and {tier.value.dim} dimensions; keys have "
            f"{shape.key_dim} and values {shape.value_dim}",
        )
        check_codec(tier.key)
        check_codec(tier.value)


def _check_reading(reading: PageReading) -> None:
    law(isinstance(reading, PageReading), f"reading is {reading!r}; it must be a PageReading")
    held = torch.arange(0, 3000)
    read = reading.pages(held, 16)
    law(
        bool(((read >= held.clamp(max=1)) & (read <= held)).all()),
        f"{reading} reads no page of a head that holds some, or more than it holds",
    )
    law(bool((read.diff() >= 0).all()), f"{reading} reads fewer pages of a head that holds more")


def _check_basis(basis: Basis, able: Capabilities, shape: CacheShape) -> None:
    half = slice(shape.kv_heads // 2, shape.kv_heads)
    for layer in range(shape.layers):
        whole = _bind(basis, layer, shape)
        part = _bind(basis, layer, shard(shape, half)) if able.splits_heads else None
        for facet, dim in (("key", shape.key_dim), ("value", shape.value_dim)):
            maps: HeadBasis | None = getattr(whole, facet)
            if maps is None:
                continue
            law(
                maps.matrix.shape[:2] == (shape.kv_heads, dim),
                f"layer {layer}'s {facet} basis has shape {tuple(maps.matrix.shape)}; "
                f"expected {shape.kv_heads} heads of {dim} dimensions",
            )
            law(
                not keeps_shape(basis) or (set(maps.rank), maps.together) == ({dim}, 1),
                f"layer {layer}'s {facet} basis stores other vectors than heads of {dim} "
                "dimensions, although keeps_shape is true",
            )
            if part is None:
                continue
            shared: HeadBasis | None = getattr(part, facet)
            ranks = maps.rank[slice(half.start // maps.together, half.stop // maps.together)]
            law(
                shared is not None
                and (shared.rank, shared.together) == (ranks, maps.together)
                and all(
                    equal(mine, theirs[half])
                    for mine, theirs in (
                        (shared.matrix, maps.matrix),
                        (shared.dual, maps.dual),
                        (shared.shift, maps.shift),
                    )
                    if mine is not None and theirs is not None
                ),
                f"layer {layer}'s {facet} basis differs between a shard of the heads and the whole",
            )


def _bind(basis: Basis, layer: int, shape: CacheShape) -> LayerBasis:
    bound = works(f"bind failed for layer {layer} of {shape}", basis.bind, layer, shape)
    law(isinstance(bound, LayerBasis), f"bind returns {bound!r}; it must return a LayerBasis")
    return bound
