"""The check of architectures sees differences, and its result is where documents have it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kv_transformers import CompressedCache
from tools.models.build import architectures, build, config_of, with_variants
from tools.models.check import Check, Failure, check, together
from tools.models.families import FAMILIES, FEW
from tools.models.page import PAGE, README, written
from tools.models.results import broken, rows, summary
from tools.tables.page import result


def test_the_result_has_a_row_of_every_architecture() -> None:
    found = [(row["architecture"], row["variant"]) for row in rows()]
    assert found == sorted(with_variants(architectures()))
    assert summary(rows()).items() <= result("models")["summary"].items()


@pytest.mark.parametrize("path", [PAGE, README], ids=lambda path: path.name)
def test_a_page_has_what_the_result_gives(path: Any) -> None:
    text = path.read_text()
    assert "<!-- models: " in text
    assert written(text) == text, "run python -m tools.models.page"


def test_families_and_the_chosen_few_are_architectures() -> None:
    named = {name for names in FAMILIES.values() for name in names}
    assert {*FEW} | named <= {*architectures()}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("llama", {"full_attention"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
        ("gemma3_text", {"sliding_attention", "full_attention"}),
        ("lfm2_moe", {"conv", "full_attention"}),
        ("nemotron_h", {"linear_attention", "moe", "full_attention", "mlp"}),
    ],
)
def test_a_small_model_has_each_kind_of_layer(name: str, types: set[str]) -> None:
    config = config_of(name)
    assert {*(getattr(config, "layer_types", None) or ["full_attention"])} == types
    assert config.num_hidden_layers <= 8
    assert config.hidden_size == 64


def test_a_small_model_is_the_same_each_time() -> None:
    first, second = (build("qwen3").state_dict() for _ in range(2))
    assert all(bool((first[name] == second[name]).all()) for name in first)


def test_a_plain_model_is_equal_and_answers_with_many_tokens() -> None:
    row = check("llama")
    assert row["result"] == "equal", row["said"]
    assert row["layers"] == {"full_attention": 3}
    assert row["compressed"] == 3
    assert row["distinct"] > 8


def test_a_model_with_an_encoder_is_refused() -> None:
    row = check("vision-encoder-decoder")
    assert row["result"] == "refused"
    assert row["said"].startswith("VisionEncoderDecoderModel has an encoder")


@pytest.fixture(scope="module")
def llama() -> Check:
    return Check(build("llama"))


def test_a_cache_that_loses_tokens_is_wrong(llama: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama.cache
    monkeypatch.setattr(llama, "cache", lambda: whole("streaming:budget=24"))
    (wrong,) = llama.tokens()
    assert wrong.startswith("generated: other tokens")


def test_a_selector_that_keeps_more_than_it_promises_is_wrong(llama: Check) -> None:
    (wrong,) = llama.selects("streaming:budget=28")
    assert wrong == "keeps [168, 168] tokens instead of 144"


def test_a_model_that_changed_is_wrong(llama: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*llama.unchanged()]
    monkeypatch.setattr(llama, "own", replace(llama.own, logits=llama.own.logits * 1.01))
    (wrong,) = llama.unchanged()
    assert wrong.startswith("the model's own logits are off")


@pytest.mark.parametrize(
    ("act", "late"),
    [
        (lambda cache: cache.crop(1), True),
        (lambda cache: cache.runtime.begin(torch.ones(2, dtype=torch.bool)), False),
    ],
    ids=["a refusal", "a call that fails"],
)
def test_only_a_refusal_of_ours_is_late(
    llama: Check,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[CompressedCache], object],
    late: bool,
) -> None:
    def raises(self: Check) -> None:
        act(CompressedCache(self.model, "raw"))

    monkeypatch.setattr(Check, "_selectors", lambda self: iter(()))
    for part in ("chunks", "turn", "again", "beams", "close", "picture", "unchanged"):
        monkeypatch.setattr(Check, part, _nothing)
    monkeypatch.setattr(Check, "cache", raises)
    (failure,) = llama.failures()
    assert failure.part == "tokens"
    assert failure.late == late


def test_what_the_models_own_cache_cannot_do_is_noted(
    llama: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Check, cache: object) -> None:
        raise IndexError("no")

    monkeypatch.setattr(Check, "_turns", fails)
    assert not [*llama.turn()]
    assert llama.skipped["turn"] == "IndexError: no"


def _nothing(self: Check) -> Iterator[str]:
    return iter(())


def test_parts_that_say_the_same_are_named_together() -> None:
    one, two, other = Failure("a", "no"), Failure("b", "no"), Failure("c", "never")
    assert together([one, two]) == "no"
    assert together([one, other, two]) == "a, b: no; c: never"


def test_what_was_equal_must_stay_so() -> None:
    def row(name: str, kind: str) -> dict[str, str]:
        return {"architecture": name, "variant": "", "result": kind, "said": kind}

    before = [row("a", "equal"), row("b", "refused"), row("c", "refused")]
    now = [row("a", "refused"), row("b", "equal"), row("c", "wrong"), row("d", "refused")]
    assert broken(now, before) == [
        "a: refused, but was equal in the result: refused",
        "c: wrong: wrong",
    ]
