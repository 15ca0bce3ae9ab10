"""The text form of policies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Meta

from kv_policy import (
    Budget,
    CompositionError,
    Evictor,
    Formats,
    Part,
    Raw,
    UnknownPolicyError,
    compose,
    parse,
)


@dataclass(frozen=True)
class Every(Evictor):
    """One parameter of each kind."""

    name: ClassVar[str] = "every"
    source: ClassVar[str] = "a test"

    window: Annotated[int, Meta(ge=1, le=99, description="the last ones")] = 32
    rate: float = 0.5
    text: str = "a"
    maybe: str | None = None
    limit: Annotated[int | None, Meta(description="or none")] = 7
    floor: Budget | None = None
    kind: Literal["avg", "max"] = "avg"
    size: Literal[1, 2] | None = None
    flag: bool = False

    @property
    def protected(self) -> int:
        return self.window


@dataclass(frozen=True)
class Stored(Part):
    name: ClassVar[str] = "stored"
    path: str

    @property
    def formats(self) -> Formats:
        return Raw()


BUDGETS = st.one_of(
    st.integers(99, 10**6).map(Budget),
    st.floats(0.01, 100).map(lambda x: Budget(x, "percent")),
    st.floats(0.01, 1e9).map(lambda x: Budget(x, "bytes")),
)
TEXTS = (
    st.text() | st.text("\\+,:=% \tn") | st.sampled_from(["none", "true", "null", "1", "\\none"])
)
EVERY = st.builds(
    Every,
    budget=BUDGETS,
    window=st.integers(1, 99),
    rate=st.floats(allow_nan=False),
    text=TEXTS,
    maybe=st.none() | TEXTS,
    limit=st.none() | st.integers(),
    floor=st.none() | BUDGETS,
    kind=st.sampled_from(["avg", "max"]),
    size=st.sampled_from([None, 1, 2]),
    flag=st.booleans(),
)
repeated = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@repeated
@given(EVERY, TEXTS)
def test_text_comes_back_equal(register: Callable[..., None], part: Every, path: str) -> None:
    register(Every, Stored)
    for policy in (part, compose(Stored(path=path), part)):
        again = parse(str(policy))
        assert again == policy
        assert str(again) == str(policy)
        assert hash(again) == hash(policy)


def test_only_what_differs_is_written(register: Callable[..., None]) -> None:
    register(Every)
    assert str(Every()) == "every"
    text = "every:budget=25%,window=4,rate=2.0,maybe=a\\+b\\,c,limit=none,flag=true"
    policy = parse(text)
    assert str(policy) == text
    assert policy == Every(Budget(25, "percent"), 4, 2.0, maybe="a+b,c", limit=None, flag=True)


def test_white_space_around_names_and_values_does_not_matter(
    register: Callable[..., None],
) -> None:
    register(Every, Stored)
    spaced = parse(" every : window = 4 , maybe = b  + stored:path=x\n")
    assert spaced == parse("every:window=4,maybe=b+stored:path=x")


def test_equal_values_have_one_text() -> None:
    assert Every(rate=2) == Every(rate=2.0)
    assert str(Every(rate=2)) == str(Every(rate=2.0)) == "every:rate=2.0"
    assert str(Every(budget=Budget(2048.0))) == "every:budget=2048"


def test_order_of_parts_and_keys_does_not_matter(register: Callable[..., None]) -> None:
    register(Every, Stored)
    one = parse("stored:path=x+every:window=4,rate=1")
    assert one == parse("every:rate=1,window=4+stored:path=x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a policy's name is missing"),
        ("  ", "a policy's name is missing"),
        ("every+", "a policy's name is missing"),
        (":window=3", "a policy's name is missing"),
        ("every:", "'' in 'every:' is not of the form key=value"),
        ("every:window", "'window' in 'every:window' is not of the form key=value"),
        ("every:=3", "'=3' in 'every:=3' is not of the form key=value"),
        ("every:window=3,window=4", "'window' is given twice"),
        (
            "every:windw=3",
            "every has no parameter 'windw'; its parameters: budget, window, rate, text, maybe, "
            "limit, floor, kind, size, flag, keep",
        ),
        ("raw:x=1", "raw has no parameter 'x'; its parameters: none"),
        ("stored", "stored needs path="),
        ("every:window=0", "every: window=0 is refused: Expected `int` >= 1"),
        ("every:window=x", "every: window=x is refused"),
        ("every:window=1.5", "every: window=1.5 is refused"),
        ("every:kind=sum", "every: kind=sum is refused: use one of avg, max"),
        ("every:flag=maybe", "every: flag=maybe is refused"),
        ("every:rate=much", "every: rate=much is refused"),
        ("every:budget=0", "every: budget=0 is refused: budget is 0 tokens"),
        ("every:budget=much", "every: budget=much is refused: budget 'much' is not understood"),
        ("every:floor=much", "every: floor=much is refused: budget 'much' is not understood"),
        ("every:budget=none", "budget 'none' is not understood"),
        ("every:budget=8,window=9", "a budget of 8 tokens is smaller than the 9 it protects"),
    ],
)
def test_bad_text_is_refused(register: Callable[..., None], text: str, message: str) -> None:
    register(Every, Stored)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse(text)
    assert message in str(error.value)


def test_unknown_names_list_what_is_installed(register: Callable[..., None]) -> None:
    register(Every, Stored)
    with pytest.raises(UnknownPolicyError) as error:
        parse("snapkw:window=3+raw")
    assert str(error.value) == "unknown policy 'snapkw'; installed policies: every, raw, stored"


def test_parts_that_do_not_go_together_are_named_as_written(register: Callable[..., None]) -> None:
    register(Every, Stored)
    with pytest.raises(CompositionError, match="raw and stored:path=x both define how tokens are"):
        parse("raw+stored:path=x")


def test_values_are_checked_from_python_too() -> None:
    for wrong in ({"window": 0}, {"window": 1.5}, {"text": 3}, {"flag": 1}, {"kind": "sum"}):
        (key,) = wrong
        with pytest.raises(ValueError, match=f"every: {key}="):
            Every(**wrong)
    with pytest.raises(ValueError, match="expected a Budget, such as"):
        Every(budget=1024)
    with pytest.raises(ValueError, match="expected a Budget, such as"):
        Every(floor="10%")


def test_parameters_describe_themselves() -> None:
    described = {p.name: p for p in Every.parameters()}
    assert list(described)[:3] == ["budget", "window", "rate"]
    assert described["budget"].default == "1024"
    assert described["budget"].type == "tokens, % or B"
    assert described["floor"].type == "tokens, % or B | none"
    assert described["window"].doc == "the last ones"
    assert described["limit"].type == "int | none"
    assert described["limit"].doc == "or none"
    assert described["kind"].type == "avg | max"
    assert described["size"].type == "1 | 2 | none"
    assert described["flag"].default == "false"
    assert described["maybe"].default == "none"
    assert [p.default for p in Stored.parameters()] == ["required"]


@given(st.integers(1, 100).map(str) | st.floats(0.01, 100).map(repr))
@repeated
def test_keep_is_a_budget_in_percent(register: Callable[..., None], share: str) -> None:
    register(Every)
    policy = parse(f"every:keep={share}%,window=4")
    assert policy == parse(f"every:budget={share}%,window=4")
    assert parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("every:keep=25%,budget=8", "every: keep=25% and budget=8 both set how much is kept"),
        ("every:keep=25%,keep=20%", "'keep' is given twice"),
        ("every:keep=0.25", "to keep 0.25 of the tokens seen write keep=25%"),
        ("every:keep=25", "to keep 0.25 of the tokens seen write keep=25%"),
        ("every:keep=0%", "from above 0% to 100%"),
        ("every:keep=101%", "from above 0% to 100%"),
        ("every:keep=512B", "from above 0% to 100%"),
        ("every:keep=much", "from above 0% to 100%"),
        ("every:budget=0.25", "tokens are whole; to keep 0.25 of the tokens seen write keep=25%"),
        ("stored:path=x,keep=25%", "stored has no parameter 'keep'; its parameters: path"),
    ],
)
def test_a_share_that_is_not_one_is_refused(
    register: Callable[..., None], text: str, message: str
) -> None:
    register(Every, Stored)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        parse(text)
    assert message in str(error.value)


def test_a_parameter_of_that_name_is_the_parts_own(register: Callable[..., None]) -> None:
    @dataclass(frozen=True)
    class Own(Every):
        name: ClassVar[str] = "own"
        keep: int = 3

    register(Own)
    assert parse("own:keep=5") == Own(keep=5)
    assert [p.name for p in Own.parameters()].count("keep") == 1


def test_what_is_not_installed_is_known_to_one_text() -> None:
    policy = parse("every:window=7+stored:path=a", extra=[Every, Stored])
    assert policy == compose(Every(window=7), Stored("a"))
    assert parse("EVERY", extra=[Every]) == Every()
    with pytest.raises(UnknownPolicyError, match="unknown policy 'every'"):
        parse("every")
    with pytest.raises(UnknownPolicyError, match=r"the nearest of .* installed: every"):
        parse("evry", extra=[Every])


def test_names_of_what_is_not_installed_must_be_free(register: Callable[..., None]) -> None:
    register(Every)

    class EVERY(Every):
        name = "Every"

    class Again(Stored):
        pass

    with pytest.raises(
        ValueError, match="EVERY is named 'Every', which the installed package test already uses"
    ):
        parse("raw", extra=[EVERY])
    with pytest.raises(ValueError, match="Stored and Again are both named 'stored'"):
        parse("raw", extra=[Stored, Again])
    assert parse("stored:path=a", extra=[Stored, Stored]) == Stored("a")
    with pytest.raises(TypeError, match=r"Stored\(path='a'\)"):
        parse("raw", extra=[Stored("a")])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="Part has no name; set"):
        parse("raw", extra=[Part])
