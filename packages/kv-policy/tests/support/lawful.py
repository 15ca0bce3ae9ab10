"""A policy that keeps every law, for others to break one each, and what they are told."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Part, protect
from kv_policy.testing import check_policy


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


def refusal(policy: Part) -> str:
    """What the conformance check says of a policy that breaks a law."""
    with pytest.raises(AssertionError) as error:
        check_policy(policy)
    return str(error.value)
