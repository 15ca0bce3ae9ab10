"""Multi-head latent attention (MLA) over the latents themselves, without expanding them.

A layer's cache gets a latent of r dimensions and a rotated key of dr dimensions per token, shared
by all heads. A linear layer expands them to keys and values of each head; here its weights are
applied to queries and outputs instead, so all heads attend to one KV head, whose key is the latent
followed by the rotated key, and whose value is the latent (the absorption of DeepSeek-AI 2024,
DeepSeek-V2, section 2.1.2, https://arxiv.org/abs/2405.04434).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kv_runtime import Expanded

EXPAND: Final = "expand_kv"  # the method with which transformers' modules expand latents
WEIGHT: Final = "kv_b_proj"  # the linear layer that it applies
INDEXER: Final = "indexer"  # a module that selects the tokens of each query
SIZES: Final = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
_ROWS: Final = 3  # tokens expanded to compare a module's expansion with its weights
_NEAR: Final = 0.02  # tolerance, relative to the norm of the vectors, for 16-bit rounding


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of a layer's latent attention.

    Attributes:
        heads: query heads.
        nope: dimensions of a head's key that come from the latent.
        rotated: dr, dimensions of the rotated key, which heads share.
        value: dimensions of a head's value.
        rank: r, dimensions of the latent.
    """

    heads: int
    nope: int
    rotated: int
    value: int
    rank: int

    @classmethod
    def of(cls, module: nn.Module) -> "LatentSizes | None":
        """Read the sizes of an attention module; None: it lacks some."""
        found = [getattr(module, name, None) for name in SIZES]
        whole = [each for each in found if isinstance(each, int)]
        return cls(*whole) if len(whole) == len(SIZES) else None

    @classmethod
    def configured(cls, config: Any) -> "LatentSizes | None":
        """Read the sizes from a layer's configuration; None: it has no latent attention."""
        if not is_latent(config):
            return None
        names = ("num_attention_heads", *SIZES[1:])
        return cls(*(int(getattr(config, name, None) or 0) for name in names))


def is_latent(config: Any) -> bool:
    """Return whether a layer's configuration says that it has latent attention."""
    return bool(getattr(config, "kv_lora_rank", None))


@dataclass(frozen=True, slots=True)
class Latents:
    """The new latents of a layer, from `cache.update` to attention.

    Attributes:
        layer: the layer's index among those that the cache stores.
        latent: the latents.
        rotated: the rotated keys.
        whole: whether the model is given all of them, and not only the last column.
    """

    layer: int
    latent: Float[Tensor, "B 1 L r"]
    rotated: Float[Tensor, "B 1 L dr"]
    whole: bool = False

    @property
    def last(self) -> tuple[Float[Tensor, "B 1 1 r"], Float[Tensor, "B 1 1 dr"]]:
        """The latents of the last column."""
        return self.latent[:, :, -1:], self.rotated[:, :, -1:]

    @property
    def given(self) -> tuple[Float[Tensor, "B 1 n r"], Float[Tensor, "B 1 n dr"]]:
        """What the model is given, which expands it; a single column for nothing."""
        return (self.latent, self.rotated) if self.whole else self.last


@dataclass(frozen=True, slots=True)
class Absorbed:
    """The inputs of attention over latents, and what turns its output into that of the heads.

    Attributes:
        query: queries of all heads, for the latents followed by rotated keys.
        key: the latents followed by the rotated keys.
        weights: the weights of the expansion.
        differs: whether the model's expanded keys or values differ from its weights; None: they
            were not compared.
        expanded: the vectors of each head, if the model has expanded all new latents.
    """

    query: Float[Tensor, "B Hq L D"]
    key: Float[Tensor, "B 1 L D"]
    weights: "_Weights"
    differs: Bool[Tensor, ""] | None
    expanded: Expanded | None

    @property
    def value(self) -> Float[Tensor, "B 1 L r"]:
        """The latents, as a view of the keys."""
        return self.key[..., : self.weights.sizes.rank]

    def heads(self, out: Float[Tensor, "B L Hq r"]) -> Float[Tensor, "B L Hq Dv"]:
        """Return the output of the heads, from sums of latents."""
        return torch.einsum("blhr,hvr->blhv", out, self.weights.value).contiguous()


def absorbed(
    module: nn.Module,
    found: Latents,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    compare: bool,
) -> Absorbed:
    """Turn the inputs of a module's attention into those of attention over its latents.

    Args:
        module: the attention module.
        found: its new latents.
        query: queries of each head, rotated dimensions last, [B, Hq, L, Dq].
        key: keys that the model expanded from `found.given`, [B, Hq, n, Dq].
        value: values that the model expanded from `found.given`, [B, Hq, n, Dv].
        compare: whether to compare the last of these with the weights of the expansion.

    Raises:
        RuntimeError: the sizes do not match: the model changes vectors before attention.
    """
    weights = _Weights.of(module)
    size = weights.sizes
    batch, _, length, _ = found.latent.shape
    dim, rows = size.nope + size.rotated, length if found.whole else 1
    wanted = {
        "queries": (query, (batch, size.heads, length, dim)),
        "keys": (key, (batch, size.heads, rows, dim)),
        "values": (value, (batch, size.heads, rows, size.value)),
    }
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise RuntimeError(
                f"{type(module).__name__} attends with {name} of shape {tuple(x.shape)} to latents "
                f"that expand to {shape}: it changes vectors between cache.update and attention, "
                "so a compressed cache cannot support it; use a cache of transformers"
            )
    differs = None
    if compare:
        differs = _apart(weights.expanded(*found.last), (key[:, :, -1:], value[:, :, -1:]))
    plain, rotated = query.split((size.nope, size.rotated), -1)
    inner = torch.einsum("bhld,hdr->bhlr", plain, weights.key)
    joined = torch.cat((found.latent, found.rotated), -1)
    expanded = Expanded(query, key, value) if found.whole else None
    return Absorbed(torch.cat((inner, rotated), -1), joined, weights, differs, expanded)


def expect_equal(differs: Mapping[int, Bool[Tensor, ""]]) -> None:
    """Raise if a model attended to something else than the expanded latents of a layer.

    Raises:
        RuntimeError: it did; the message names the layer.
    """
    if not differs:
        return
    found = torch.stack(list(differs.values())).tolist()  # one synchronization for all layers
    for layer, wrong in zip(differs, found, strict=True):
        if wrong:
            raise RuntimeError(
                f"layer {layer} attends to other keys or values than those that {WEIGHT} expands "
                "from the latents in the compressed cache, so it cannot be supported; discard the "
                "output of this pass, and use a cache of transformers"
            )


def latent_reasons(
    named: Mapping[str, nn.Module], sizes: LatentSizes, indexed: Collection[str] = ()
) -> Iterator[str]:
    """Yield the reasons why attention over latents cannot replace that of these modules.

    Args:
        named: the attention modules of all layers that are stored, by name.
        sizes: their sizes, as the configuration has them.
        indexed: names of those that attend to tokens that an indexer selects, by the
            configuration.
    """
    fine = {}
    for name, module in named.items():
        reason = _reason(name, module, sizes, name in indexed)
        if reason is None:
            fine[name] = module
        else:
            yield reason
    if not fine:
        return
    with torch.no_grad():
        apart = [_differs(module) for module in fine.values()]
    for name, wrong in zip(fine, torch.stack(apart).tolist(), strict=True):
        if wrong:
            yield (
                f"has latent attention at {name} whose {EXPAND} does more than to apply {WEIGHT} "
                "and to append the rotated key to each head's; a compressed cache of latents "
                "supports nothing else"
            )


def _reason(name: str, module: nn.Module, sizes: LatentSizes, indexed: bool) -> str | None:
    """Return why a module's latents are not supported, from its members alone."""
    layer = getattr(module, WEIGHT, None)
    if not callable(getattr(module, EXPAND, None)) or not isinstance(layer, nn.Module):
        return (
            f"has latent attention (MLA), but {name} ({type(module).__name__}) does not expand "
            f"latents by a method {EXPAND} with a layer {WEIGHT}, as models of transformers do "
            "since 5.24, so they cannot be stored"
        )
    if getattr(module, INDEXER, None) is not None and not indexed:
        return (
            f"has latent attention at {name} to tokens that an indexer selects (DSA), but its "
            "configuration does not say that the layer is of type indexed_attention"
        )
    found = LatentSizes.of(module)
    if found != sizes:
        return (
            f"has latent attention at {name} of sizes {found}, but of {sizes} by its "
            "configuration; layers whose latents differ are not supported"
        )
    weight, bias = (getattr(layer, each, None) for each in ("weight", "bias"))
    if type(layer) is not nn.Linear or not isinstance(weight, Tensor) or not _is_plain(weight):
        kind = f" of {weight.dtype}" if isinstance(weight, Tensor) else ""
        return (
            f"has latent attention whose {WEIGHT} at {name} is a {type(layer).__name__}{kind}; its "
            "weights are applied to queries and outputs, for which it must be a plain nn.Linear "
            "with floating-point weights of 16 bits or more, so load the model unquantized"
        )
    if bias is not None:
        return (
            f"has latent attention whose {WEIGHT} at {name} has a bias; a compressed cache of "
            "latents supports expansions without a bias"
        )
    wanted = sizes.heads * (sizes.nope + sizes.value), sizes.rank
    if weight.shape != wanted:
        return (
            f"has latent attention whose {WEIGHT} at {name} has weights of shape "
            f"{tuple(weight.shape)}, but {sizes.heads} heads need {wanted}"
        )
    return None


def _is_plain(weight: Tensor) -> bool:
    """Whether weights are floating-point numbers of 16 bits or more, in a plain tensor."""
    # Quantizers may use a tensor subclass.
    return type(weight.data) is Tensor and weight.is_floating_point() and weight.itemsize >= 2


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of the expansion by head; views of those of the model."""

    sizes: LatentSizes
    key: Float[Tensor, "Hq Dn r"]
    value: Float[Tensor, "Hq Dv r"]

    @classmethod
    def of(cls, module: nn.Module) -> "_Weights":
        """Return views of a module's current weights."""
        sizes = LatentSizes.of(module)
        assert sizes is not None  # checked when the cache was made
        weight: Tensor = getattr(module, WEIGHT).weight
        heads = weight.view(sizes.heads, sizes.nope + sizes.value, sizes.rank)
        return cls(sizes, heads[:, : sizes.nope], heads[:, sizes.nope :])

    def expanded(
        self, latent: Float[Tensor, "B 1 L r"], rotated: Float[Tensor, "B 1 L dr"]
    ) -> tuple[Float[Tensor, "B Hq L Dq"], Float[Tensor, "B Hq L Dv"]]:
        """Return the keys and values of each head."""
        key, value = (
            torch.einsum("blr,hdr->bhld", latent[:, 0], each) for each in (self.key, self.value)
        )
        return torch.cat((key, rotated.expand(-1, self.sizes.heads, -1, -1)), -1), value


def _differs(module: nn.Module) -> Bool[Tensor, ""]:
    """Compare a module's expansion of a few random latents with its weights."""
    weights = _Weights.of(module)
    generator = torch.Generator().manual_seed(0)
    latent, rotated = (
        torch.randn(1, 1, _ROWS, dim, generator=generator).to(weights.key)
        for dim in (weights.sizes.rank, weights.sizes.rotated)
    )
    found = getattr(module, EXPAND)(latent, rotated)
    return _apart(weights.expanded(latent, rotated), found)


def _apart(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Bool[Tensor, ""]:
    """Return whether vectors differ by more than rounding."""
    wrong = torch.zeros((), dtype=torch.bool, device=wanted[0].device)
    if [x.shape for x in wanted] != [x.shape for x in found]:
        return torch.ones_like(wrong)
    for want, got in zip(wanted, found, strict=True):
        off = (want.float() - got.float()).norm()
        wrong = wrong | (off > _NEAR * want.float().norm())
    return wrong
