"""LeanKV: per token and head high precision, low precision or pruning."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from msgspec import Meta
from torch import Tensor

from kv_evict.leankv_profile import Profile, load_profile
from kv_evict.running import running_mean
from kv_policy import (
    DROP,
    FRESH,
    NOBODY,
    Capabilities,
    Formats,
    LayerView,
    Observe,
    PlanView,
    RunningMean,
    Selecting,
    Step,
    StepView,
    TieredFormats,
    UnknownPolicyError,
    ascending_order,
    read_formats,
)
from kv_policy.installing import install_command

Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class LeanKV(Selecting):
    """Store the most attended tokens of a head in high precision, most others in low, prune rest.

    A token's significance is the mean attention it receives from a query after it; query heads
    that share a KV head are reduced to the largest of their sums, or their mean (`group`).

    Prompts: the newest `window` tokens stay raw. Of the others, a head prunes the least significant
    whose shares of its attention add up to less than `t_low`, stores in `low` those up to `t_high`,
    and the rest in `high`: how much each head keeps depends on its own attention.

    Generation: the score at which a prompt reached `t_high`, in units of 1 / length, is the head's
    threshold from then on, and likewise for `t_low`. The token that leaves the window is placed by
    these thresholds, and at most one victim per step, the least significant token of the tier it
    enters, is requantized to low precision, or pruned (Algorithm 1). Without new attention an
    average falls as 1 / length, as do the thresholds, so neither tier drains or floods.

    `form="token"` uses the same thresholds `alpha_high` / length and `alpha_low` / length in every
    head and both phases, as the authors' code does. A head whose prompt has fewer than `window`
    tokens to sort uses these during generation too.

    With `low="drop"` tokens below `high` are pruned. `profile` names a file written by `kv-serve
    calibrate leankv`, which sets formats and thresholds.
    """

    name: ClassVar[str] = "leankv"
    source: ClassVar[str] = "LeanKV, Zhang et al., 2024, https://arxiv.org/abs/2412.03131"
    decode = "step"  # Algorithm 1, every step

    high: Annotated[str, Meta(description="format of significant tokens")] = "k8v4"
    low: Annotated[str, Meta(description="format of the others; drop: prune them")] = "k4v2"
    t_high: Annotated[Share, Meta(description="share of attention not stored in high")] = 0.1
    t_low: Annotated[Share, Meta(description="share of attention that is pruned")] = 0.0
    window: Annotated[int, Meta(ge=0, description="newest tokens, kept raw")] = 64
    group: Annotated[
        Literal["max", "mean"], Meta(description="reduction over the query heads of a KV head")
    ] = "max"
    last: Annotated[
        Count | None, Meta(description="last queries of a prompt to observe; none: all")
    ] = 64
    form: Annotated[
        Literal["mass", "token"], Meta(description="thresholds on shares, or on single scores")
    ] = "mass"
    alpha_high: Annotated[
        float, Meta(ge=0, description="threshold of high, times 1 / length, in form=token")
    ] = 1.0
    alpha_low: Annotated[
        float, Meta(ge=0, description="threshold of pruning, times 1 / length, in form=token")
    ] = 0.0
    profile: Annotated[
        str | None, Meta(description="file of kv-serve calibrate: formats and thresholds")
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters, and load the formats.

        Raises:
            ValueError: thresholds out of order or out of range, an invalid format, or a profile
                that cannot be read or contradicts the other parameters.
        """
        super().__post_init__()
        if self.profile is not None:
            self._follow(load_profile(Path(self.profile)))
        for above, below in (("t_high", "t_low"), ("alpha_high", "alpha_low")):
            high, low = getattr(self, above), getattr(self, below)
            if low > high:
                raise ValueError(
                    f"{self.name}: {below}={low} is above {above}={high}; pruned tokens are among "
                    f"those not stored in high precision, so use at most {high}"
                )
            if self.low == "drop" and low:
                raise ValueError(
                    f"{self.name}: with low=drop, {above} sets what is pruned, so {below}={low} "
                    "has no effect; remove it"
                )
        self._tiers()

    def _follow(self, profile: Profile) -> None:
        """Take a profile's settings; parameters set beside it must be equal."""
        for key in ("high", "low", "t_high", "t_low", "window", "group", "last"):
            found, given = getattr(profile, key), getattr(self, key)
            if given not in (found, type(self).__dataclass_fields__[key].default):
                raise ValueError(
                    f"{self.name}: {key}={given} contradicts the profile {self.profile}, which has "
                    f"{found}; remove {key} or the profile"
                )
            object.__setattr__(self, key, found)

    def _tiers(self) -> TieredFormats:
        names = [self.high] if self.low == "drop" else [self.high, self.low]
        try:
            return TieredFormats(tuple(read_formats(name) for name in names), self.window)
        except UnknownPolicyError as error:
            raise UnknownPolicyError(
                f"{self.name} stores tokens as {' and '.join(names)}: {error}; formats such as "
                f"k8v4 are in the package kv-quant: `{install_command('kv-quant')}`"
            ) from None
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @cached_property
    def formats(self) -> Formats:
        """The two precisions after the raw window."""
        return self._tiers()

    @property
    def fitted_to(self) -> str | None:
        """Fingerprint of the model that the profile was measured on."""
        return None if self.profile is None else load_profile(Path(self.profile)).fingerprint

    @property
    def capabilities(self) -> Capabilities:
        """A token's tier depends on later tokens."""
        return Capabilities(shortens=self._prunes, shares_prefixes=False, rolls_back=False)

    @property
    def _prunes(self) -> bool:
        return self.low == "drop" or self.t_low > 0 or self.alpha_low > 0

    @property
    def tiers(self) -> int:
        """High, and low unless `low` is drop."""
        return 1 if self.low == "drop" else 2

    @property
    def victim_tiers(self) -> int:
        """Tokens in low stay there, unless some are pruned."""
        return self.tiers if self._prunes else self.tiers - 1

    @property
    def observe(self) -> Observe:
        """All queries after a token, or the last of a prompt and all generated ones."""
        group: Literal["max-of-sums", "mean"] = "max-of-sums" if self.group == "max" else "mean"
        return Observe(last=self.last, group=group, skip=1, generated=True)

    @property
    def running(self) -> RunningMean:
        """The mean that `score` updates with generated queries."""
        return RunningMean(self.last)

    def score(self, view: LayerView) -> Float[Tensor, "B H L"]:
        """Return the mean attention from the queries after a token, this pass included.

        With `last` past queries have at most that weight, so generated queries gradually replace
        them.
        """
        return running_mean(view, view.score, self.last)

    def plan(self, view: PlanView) -> UInt8[Tensor, "N B H L"]:
        """Sort the tokens of each head into high, low and pruned."""
        here = view.position >= 0
        level = torch.zeros_like(view.tier)
        for below in self._below(view):
            level = torch.where(here & ~below, level, level + 1)
        tier = torch.where(level < self.tiers, level, DROP)
        stored = view.tier < FRESH  # a stored token never moves to an earlier tier
        tier = torch.where(stored, tier.maximum(view.tier), tier)
        return tier.masked_fill(~here, DROP)

    def tier_thresholds(self, view: PlanView) -> Float[Tensor, "K N B H"]:
        """Return each tier's score threshold in the prompt's plan, times the prompt's length."""
        here = view.position >= 0
        fixed = (self.alpha_high, self.alpha_low)[: self.tiers]
        if self.form == "token":
            return torch.stack([view.score.new_full(here.shape[:-1], a) for a in fixed])
        few = here.sum(-1) < max(1, self.window)
        found = []
        for below, alpha in zip(self._below(view), fixed, strict=True):
            least = view.score.masked_fill(~here | below, torch.inf).amin(-1)
            cut = least * view.length[:, None]
            cut = cut.masked_fill(~(here & below).any(-1), 0)  # no token below: no threshold
            found.append(cut.masked_fill(few, alpha))
        return torch.stack(found)

    def step(self, view: StepView) -> Step:
        """Place the candidate, and move at most one victim of the tier it enters: Algorithm 1."""
        asked = view.tier_thresholds / view.length[:, None]
        if not self._prunes:
            asked = asked[:-1]  # the last tier takes everything
        score = torch.cat((view.candidate[None], view.weakest))
        level = (score < asked[:, None]).sum(0, dtype=torch.uint8)  # each one's tier
        enters = level[:1].long()
        if self._prunes:
            level = level.masked_fill(level >= self.tiers, DROP)
            enters = enters.clamp(max=self.tiers - 1)
        tier, target = level[0], level[1:].gather(0, enters)[0]
        # No tier is below DROP, so a pruned candidate moves no token.
        return Step(tier, tier.masked_fill(target <= tier, NOBODY), target)

    def _below(self, view: PlanView) -> list[Tensor]:
        """Return per tier, best first, the tokens below its threshold."""
        if self.form == "token":
            asked = view.length[:, None, None].float().reciprocal()
            fixed = (self.alpha_high, self.alpha_low)[: self.tiers]
            return [view.score < alpha * asked for alpha in fixed]
        here = view.position >= 0
        score = view.score.double().masked_fill(~here, 0).clamp(min=0)
        total = score.sum(-1)
        if view.aside is not None:
            total = total + view.aside
        share = score / total[..., None].clamp(min=1e-30)  # of all tokens, window included
        order = ascending_order(view.score.masked_fill(~here, torch.inf))
        below = share.gather(-1, order).cumsum(-1)
        reached = torch.empty_like(below).scatter_(-1, order, below)
        # Sums equal to a threshold up to rounding, such as the total of 1, have reached it.
        return [reached < t - 1e-9 for t in (self.t_high, self.t_low)[: self.tiers]]
