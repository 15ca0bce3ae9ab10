import pytest

from kv_evict import Quest
from kv_policy import Budget, CompositionError, PageReading, load, parse
from kv_policy.testing import check_policy

LEANKV = "leankv:high=raw,low=raw"  # its formats are in another package


def test_its_parameters_are_those_of_its_reading() -> None:
    policy = parse("quest:budget=1024,sinks=8,recent=32,whole=0")
    assert policy.reading == PageReading(Budget(1024), 8, 32, 0)
    assert Quest().reading == PageReading(Budget(25, "percent"), 4, 16, 2)
    assert parse("quest:by=codes").reading == PageReading(Budget(25, "percent"), 4, 16, 2, "codes")
    assert load("quest") is Quest
    assert str(parse("quest:budget=25%")) == "quest"


@pytest.mark.parametrize(
    "spec",
    [
        "quest",
        "quest:by=codes",
        "quest:budget=12.5%+raw",
        "kv-compress:keep=50%+quest",
        "snapkv+quest",
        "r-kv+quest",
    ],
)
def test_conformance(spec: str) -> None:
    if spec.startswith("r-kv"):
        with pytest.raises(CompositionError):
            parse(spec)
        return
    check_policy(parse(spec))


def test_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^quest: budget=5B is refused: give the tokens per KV"):
        parse("quest:budget=5B")


def test_what_ranks_pages_is_bounds_or_codes() -> None:
    with pytest.raises(ValueError, match=r"^quest: by=keys is refused: use one of bounds, codes$"):
        parse("quest:by=keys")


@pytest.mark.parametrize(
    "spec",
    ["h2o", "streaming", "tova", LEANKV, f"snapkv+{LEANKV}", "kv-compress:every=64"],
)
def test_selectors_that_need_every_token_in_decode_steps_are_refused(spec: str) -> None:
    with pytest.raises(CompositionError, match=r"^quest reads some pages in a decode step, but "):
        parse(f"{spec}+quest")
