"""A policy that satisfies every law, for subclasses that break one each, and the error."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest
from msgspec import Meta
from torch import Tensor

from kv_policy import Evictor, LayerView, Part
from kv_policy.testing import check_policy


@dataclass(frozen=True)
class Good(Evictor):
    name: ClassVar[str] = "good"
    sinks: Annotated[int, Meta(ge=0)] = 3

    decode = "step"
    reads = frozenset({"keys"})

    def score(self, view: LayerView) -> Tensor:
        return self.protect(-view.keys.norm(dim=-1), view)


def refusal(policy: Part) -> str:
    """Return the error of the conformance check for a policy that breaks a law."""
    with pytest.raises(AssertionError) as error:
        check_policy(policy)
    return str(error.value)
