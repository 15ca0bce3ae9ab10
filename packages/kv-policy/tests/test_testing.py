"""The conformance checks notice each law that is broken."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import pytest
import torch
from msgspec import Meta
from torch import Tensor

from kv_policy import (
    DROP,
    NOBODY,
    BitLayout,
    Budget,
    CacheShape,
    Capabilities,
    Evictor,
    HeadBasis,
    LayerBasis,
    LayerView,
    Observe,
    Part,
    PlanView,
    Raw,
    RawCodec,
    Step,
    StepView,
    TokenFormat,
    protect,
)
from kv_policy.testing import check_codec, check_policy


@dataclass(frozen=True)
class Good(Evictor):
    name: ClassVar[str] = "good"
    sinks: Annotated[int, Meta(ge=0)] = 3

    @property
    def protected(self) -> int:
        return self.sinks

    @property
    def decode(self) -> Literal["grow", "step"]:
        return "step"

    @property
    def reads(self) -> frozenset[Literal["keys", "values"]]:
        return frozenset({"keys"})

    def score(self, view: LayerView) -> Tensor:
        return protect(-view.keys.norm(dim=-1), view, first=self.sinks)


def test_a_good_policy_passes() -> None:
    check_policy(Good())
    check_policy(Good(Budget(3)), CacheShape(1, 1, 1, 8, 8))
    check_policy(Raw(), CacheShape(1, 1, 1, 3, 5, torch.float16))


class Impure(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + torch.rand(())


class Writes(Good):
    def score(self, view: LayerView) -> Tensor:
        return protect(view.score.add_(1), view, first=self.sinks)


class Flat(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view).sum(1)


class Nan(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view).where(view.position != 1, torch.nan)


class Careful(Good):
    """Asks for values without saying that it reads them."""

    def score(self, view: LayerView) -> Tensor:
        return view.values.norm(dim=-1)


class Overprotects(Good):
    def score(self, view: LayerView) -> Tensor:
        return protect(super().score(view), view, first=self.sinks + 1)


class Clings(Good):
    """Protects the newest token, whose score stays when it is no longer the newest."""

    def score(self, view: LayerView) -> Tensor:
        return protect(view.position.float(), view, first=self.sinks - 1, last=1)


class Mixes(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) - view.length.float().mean()


class Padded(Good):
    def score(self, view: LayerView) -> Tensor:
        return super().score(view) + view.position.shape[-1]


class Normalized(Good):
    """Heads compete, and splits_heads is still said."""

    def score(self, view: LayerView) -> Tensor:
        norm = view.keys.norm(dim=-1)
        return protect(norm / norm.sum(1, keepdim=True).clamp(min=1), view, first=self.sinks)


class Greedy(Good):
    def plan(self, view: PlanView) -> Tensor:
        return super().plan(replace(view, budget=view.budget + 1))


class Stingy(Good):
    def plan(self, view: PlanView) -> Tensor:
        plan = super().plan(view)
        return torch.where(view.position == 0, DROP, plan)


class Unpadded(Good):
    def plan(self, view: PlanView) -> Tensor:
        return torch.where(view.position >= 0, super().plan(view), 0).to(torch.uint8)


class Lost(Good):
    def plan(self, view: PlanView) -> Tensor:
        return torch.where(super().plan(view) == 0, 1, DROP).to(torch.uint8)


class Wide(Good):
    def plan(self, view: PlanView) -> Tensor:
        return super().plan(view).long()


class Shares(Good):
    """Sequences of a batch share the smallest budget."""

    def plan(self, view: PlanView) -> Tensor:
        return super().plan(replace(view, budget=view.budget.min().expand_as(view.budget)))


class Random(Good):
    def plan(self, view: PlanView) -> Tensor:
        scores = torch.rand_like(view.score).where(view.score < torch.inf, torch.inf)
        return super().plan(replace(view, score=scores))


class Mute(Good):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()


class Rises(Good):
    @property
    def tiers(self) -> int:
        return 2


class Failing(Good):
    def step(self, view: StepView) -> Step:
        raise RuntimeError("no steps")


class Hoards(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, victim=torch.full_like(step.victim, NOBODY))


class Climbs(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, target=torch.zeros_like(step.target))


class Empty(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, victim=torch.zeros_like(step.victim))


class Elsewhere(Good):
    def step(self, view: StepView) -> Step:
        step = super().step(view)
        return replace(step, candidate=torch.where(step.candidate == 0, 9, DROP).to(torch.uint8))


class Meets(Good):
    """A step looks at the other sequences."""

    def step(self, view: StepView) -> Step:
        mean = view.candidate.mean().expand_as(view.candidate)
        return super().step(replace(view, candidate=mean))


class Small(Good):
    @property
    def protected(self) -> int:
        return 2000

    def __post_init__(self) -> None:
        pass


class Sized(Good):
    @property
    def observe(self) -> Observe:
        return Observe(last=4, skip=2, generated=True)

    def score(self, view: LayerView) -> Tensor:
        return protect(view.mass / view.seen, view, first=self.sinks)  # 0 / 0 is NaN


class Text(Good):
    def __str__(self) -> str:
        return "good:sinks=4"


class Name(Good):
    def __str__(self) -> str:
        return "better"


class Keys(Good):
    def __str__(self) -> str:
        return "good:sink=3"


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Impure, "score differs the second time"),
        (Writes, "score changed the view's score"),
        (Flat, "score gave torch.float32 of shape"),
        (Nan, "score gave a token NaN"),
        (Sized, "score gave a token NaN"),
        (Careful, "score failed on a view that holds just what the selector says it observes and"),
        (Overprotects, "score is infinite for more tokens of a head than the 3 protected"),
        (Clings, "so it would be protected for good"),
        (Mixes, "scores of a sequence depend on the other sequences, or on how much padding it"),
        (Padded, "scores of a sequence depend on the other sequences, or on how much padding it"),
        (Normalized, "scores of a shard of the heads differ from the whole's"),
        (Greedy, "its budget of 3 per head allows 12"),
        (Stingy, "plan drops a token whose score is infinite: a protected one"),
        (Unpadded, "plan keeps a place that holds no token"),
        (Lost, "plan sends tokens to a tier other than 0 to 0 and DROP"),
        (Wide, "plan gave torch.int64"),
        (Shares, "plans of a sequence depend on the other sequences"),
        (Random, "plan differs the second time"),
        (Mute, "plan drops tokens, and the capabilities say shortens=False"),
        (Rises, "plan sends a stored token back to an earlier tier than it is in"),
        (Failing, "step failed, though decode says 'step': RuntimeError: no steps"),
        (Hoards, "a step lets a sequence grow beyond its budget"),
        (Climbs, "a step moves its victim to no later tier, nor to DROP"),
        (Empty, "a step takes its victim from an empty tier"),
        (Elsewhere, "a step sends the candidate to a tier other than 0 to 0 and DROP"),
        (Meets, "a step depends on other sequences"),
        (Small, "the budget of 1024 tokens is below the 2000 it protects"),
        (Text, "reading good:sinks=4 gives Text"),
        (Name, "better does not start with its name, good"),
        (Keys, "the parameters of good:sink=3 cannot be read back"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Part], law: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_policy(broken())
    assert law in str(error.value)


def test_a_step_of_a_shard_is_checked() -> None:
    class Neighbours(Good):
        def step(self, view: StepView) -> Step:
            return super().step(replace(view, candidate=view.candidate.roll(1, -1)))

    with pytest.raises(AssertionError, match="a step of a shard of the heads differs"):
        check_policy(Neighbours())


def test_registered_parts_must_parse_back_equal(register: Callable[..., None]) -> None:
    @dataclass(frozen=True)
    class Other(Good):
        pass

    register(Other)  # another class has the name
    with pytest.raises(AssertionError, match="which is not equal to"):
        check_policy(Good())
    register(Good)
    check_policy(Good())


@dataclass(frozen=True)
class Store(Part):
    """Formats that are given from outside."""

    name: ClassVar[str] = "store"
    tiers: ClassVar[int] = 1
    window: ClassVar[int] = 0
    bound: ClassVar[object] = None

    @property
    def formats(self) -> "Store":
        return self

    def bind(self, shape: CacheShape) -> object:
        return self.bound


def format(key: int = 64, value: int = 32) -> TokenFormat:
    return TokenFormat(RawCodec(key, torch.float16), RawCodec(value, torch.float16))


@pytest.mark.parametrize(
    ("answers", "law"),
    [
        ({"window": -1}, "the raw window is -1 tokens"),
        ({"tiers": 0}, "formats has 0 tiers"),
        ({"bound": None}, "it must give a tuple of TokenFormat"),
        ({"bound": (format(), format())}, "bind gave 2 formats and tiers says 1"),
        ({"bound": (format(32, 64),)}, "bind gave codecs for 32 and 64 dimensions"),
    ],
)
def test_broken_formats_are_told_their_law(answers: dict[str, object], law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_policy(type("Broken", (Store,), answers)())
    check_policy(type("Right", (Store,), {"bound": (format(),)})())


@dataclass(frozen=True)
class Rotated(Part):
    name: ClassVar[str] = "rotated"
    cut: bool = True

    @property
    def basis(self) -> "Rotated":
        return self

    def bind(self, layer: int, shape: CacheShape) -> LayerBasis:
        matrix = torch.linalg.qr(torch.randn(4, 64, 64, generator=torch.manual_seed(layer))).Q
        first = shape.first_head if self.cut else 0
        matrix = matrix[first : first + shape.kv_heads]
        return LayerBasis(key=HeadBasis(matrix, (64,) * len(matrix)))


def test_a_basis_is_cut_to_the_heads_of_its_shard() -> None:
    check_policy(Rotated())
    with pytest.raises(AssertionError, match="layer 0's key basis of a shard of the heads differs"):
        check_policy(Rotated(cut=False))
    with pytest.raises(AssertionError, match="8 heads of 64 dimensions are right"):
        check_policy(Rotated(), CacheShape(2, 8, 1, 64, 64))


def test_what_is_no_policy_is_told_so() -> None:
    with pytest.raises((AssertionError, TypeError), match="KVPolicy"):
        check_policy("k8v4")

    class Nothing(Part):
        name = "nothing"

    with pytest.raises(
        AssertionError, match="nothing supplies no selector, no formats and no basis"
    ):
        check_policy(Nothing())


@dataclass(frozen=True)
class Eight:
    """Integers of 8 bits from -1 to 1, and what a subclass breaks."""

    dim: int = 12
    block: ClassVar[int] = 1

    @property
    def layout(self) -> BitLayout | None:
        return BitLayout(self.dim, 8, self.dim)

    @property
    def parts(self) -> tuple[int, ...]:
        return (self.dim, 4)

    def encode(self, x: Tensor) -> Tensor:
        codes = ((x[:, 0].float().nan_to_num().clamp(-1, 1) + 1) * 127).round().to(torch.uint8)
        meta = torch.tensor([1 / 127, -1], dtype=torch.float16).view(torch.uint8)
        return torch.cat([codes, meta.expand(len(x), 4)], 1)

    def decode(self, data: Tensor) -> Tensor:
        scale = torch.tensor(1 / 127, dtype=torch.float16).float()
        return (data[:, : self.dim].float() * scale - 1)[:, None]

    def bound(self, x: Tensor) -> Tensor:
        return (x.abs() - 1).clamp(min=0).double() + 0.006


def test_a_good_codec_passes() -> None:
    check_codec(Eight())
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        check_codec(RawCodec(7, dtype))


class Short(Eight):
    @property
    def parts(self) -> tuple[int, ...]:
        return (self.dim, 5)


class Signed(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x).to(torch.int16)


class Boastful(Eight):
    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, 0.001)


class Vague(Eight):
    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, torch.inf)


class Batchwise(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x / x.abs().amax().clamp(min=1))

    def bound(self, x: Tensor) -> Tensor:
        return torch.full(x.shape, 1e38)


class Leaky(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.where(x.isfinite().all(), 0))


class Moved(Eight):
    """Codes lie in reverse, which the layout does not say."""

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.flip(-1))

    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data).flip(-1)


class Shared(Eight):
    """The layout gives two tokens one scale, and a block has one token."""

    @property
    def layout(self) -> BitLayout | None:
        return BitLayout(self.dim, 8, self.dim, tokens=2)


class Whole(Eight):
    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data.view(torch.float32).view(torch.uint8))


class Eager(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x.clamp_(-1, 1))


class Nonempty(Eight):
    def decode(self, data: Tensor) -> Tensor:
        return super().decode(data) + data.max() * 0


class Noisy(Eight):
    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x + torch.rand(()) * 0.01)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Short, "promise (12, 17)"),
        (Signed, "encode gives torch.int16; it must give uint8"),
        (Boastful, "more than bound(x) says for normal vectors"),
        (Vague, "the bound of normal vectors is infinite: it says nothing"),
        (Batchwise, "a block encoded alone has other bytes than the same block in a batch"),
        (Leaky, "an infinity or a NaN in one block changes the bytes of another"),
        (Moved, "decode does not give code * scale + zero of its own layout"),
        (Shared, "2 tokens that share scales and so parts (12, 0); the codec has 12, blocks of 1"),
        (Whole, "decode failed on bytes inside a page"),
        (Eager, "encode changed its input"),
        (Nonempty, "decode failed on the bytes of no vectors"),
        (Noisy, "encode gave other bytes the second time"),
    ],
)
def test_a_broken_codec_is_told_its_law(broken: type[Eight], law: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_codec(broken())
    assert law in str(error.value)


def test_the_checks_stay_out_of_what_users_import() -> None:
    code = "import sys, kv_policy; print({'kv_policy.testing', 'hypothesis'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
