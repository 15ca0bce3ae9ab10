"""The return values of a third-party selector, and the checks of them."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch

from kv_policy import (
    DROP,
    Budget,
    CacheShape,
    Capabilities,
    Evictor,
    KVPolicy,
    LayerView,
    Part,
    PlanView,
    Rope,
    Selector,
    parse,
)
from kv_runtime import PolicyCache
from kv_transformers.support import expect_order

SHAPE = CacheShape(2, 2, 2, 8, 8, torch.float32)


@dataclass(frozen=True)
class Theirs(Evictor):
    name: ClassVar[str] = "theirs"
    fault: Literal["none", "shape", "integers", "list", "nan", "plan"] = "none"

    reads = frozenset({"keys"})
    decode = "step"

    def score(self, view: LayerView):
        score = view.keys.norm(dim=-1)
        if self.fault == "shape":
            return score[..., 0]
        if self.fault == "integers":
            return score.long()
        if self.fault == "list":
            return score.tolist()
        if self.fault == "nan" and view.layer[0] == 1:
            return score * 0 / 0
        return score

    def plan(self, view: PlanView):
        plan = super().plan(view)
        return plan.long() if self.fault == "plan" else plan


def read(fault: str, key: float = 1.0) -> PolicyCache:
    return passes(Theirs(Budget(6), fault=fault), 1, key)


def passes(policy: KVPolicy, sequences: int, key: float = 1.0) -> PolicyCache:
    cache = PolicyCache(policy, SHAPE, page_tokens=4)
    draw = torch.Generator().manual_seed(1)
    for length in (20, 1):
        cache.begin(torch.ones(sequences, length, dtype=torch.bool))
        for layer in range(2):
            query = torch.randn(sequences, 2, 2, length, 8, generator=draw)
            keys, values = torch.randn(2, sequences, 2, length, 8, generator=draw)
            cache.attend(layer, query, keys * key, values, 0.3)
    return cache


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("shape", r"theirs scored layer 0 with float32 of shape \(1, 2\); .*\(1, 2, 20\)"),
        ("integers", r"theirs scored layer 0 with int64 of shape \(1, 2, 20\)"),
        ("list", "theirs scored layer 0 with a list; score"),
        ("nan", r"theirs returned NaN scores \(in scoring 2 of 2 of this pass\)"),
        ("plan", "theirs planned from layer 0 on with int64 of shape"),
    ],
)
def test_answers_of_another_kind_are_refused_by_a_sentence(fault: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(fault)


def test_what_is_right_is_taken_and_nan_of_the_model_is_no_fault_of_the_methods() -> None:
    assert int(read("none").memory().tokens.max()) == 6
    read("none", key=torch.nan)


@pytest.mark.parametrize("given", [("k8v4", "snapkv"), (None, 3), ("k8v4", None)])
def test_arguments_that_are_no_model_and_policy_are_refused(given: tuple[object, object]) -> None:
    with pytest.raises(TypeError, match="a transformers model and then a policy or its text"):
        expect_order(*given)


def test_queries_are_read_in_the_scale_of_the_models_attention() -> None:
    # Expected attention uses q·k / sqrt(D), so a model with another scale has rescaled queries.
    kept = []
    for scale, factor in ((0.5, 1.0), (8**-0.5, 0.5 * 8**0.5)):
        shape = replace(SHAPE, rope=Rope((1.0, 0.3, 0.1, 0.01)))
        cache = PolicyCache(parse("expected-attention:budget=8,sinks=1"), shape, page_tokens=4)
        draw = torch.Generator().manual_seed(5)
        cache.begin(torch.ones(1, 40, dtype=torch.bool))
        for layer in range(2):
            query = 4 * torch.randn(1, 2, 2, 40, 8, generator=draw)
            key, value = torch.randn(2, 1, 2, 40, 8, generator=draw)
            cache.attend(layer, query * factor, key, value, scale)
        store = cache.batch.stores[0]
        kept.append(store.read(store.table_rows()).position.sort(-1).values.tolist())
    assert kept[0] == kept[1]


def test_a_view_says_of_each_row_which_layer_it_is_of() -> None:
    found = []

    class Asked(Theirs):
        def score(self, view: LayerView):
            found.append(view.layer.tolist())
            return super().score(view)

    passes(Asked(Budget(6)), sequences=3)
    assert found == [[0, 0, 0], [1, 1, 1], [0, 0, 0, 1, 1, 1]]


class Bare:
    """A selector without a base class, with only the two methods."""

    def score(self, view: LayerView):
        return torch.zeros_like(view.score)

    def plan(self, view: PlanView):
        return torch.where(view.position % 2 == 0, 0, DROP).byte()


@dataclass(frozen=True)
class Even(Part):
    name: ClassVar[str] = "even"

    @property
    def selector(self) -> Selector:
        return Bare()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(shortens=True, shares_prefixes=False, rolls_back=False)


def test_a_selector_of_two_methods_is_served() -> None:
    cache = passes(Even(), sequences=2)
    assert cache.memory().tokens.unique().tolist() == [11]  # ten of the prompt, and the new ones
    with pytest.raises(ValueError, match="even keeps tokens by its own rule, so a budget of 9"):
        PolicyCache(Even(), SHAPE, budgets=[Budget(9)])
