"""Lists of policies: where one ends and the next begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_eval.evaluate.specs import expand, read_specs, split_specs
from kv_policy import UnknownPolicyError
from kv_transformers.from_text import FULL, read_spec


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("k8v4", ["k8v4"]),
        ("k8v4,k4v2", ["k8v4", "k4v2"]),
        (" k8v4 , full", ["k8v4", "full"]),
        ("snapkv:budget=1024,window=32+k8v4", ["snapkv:budget=1024,window=32+k8v4"]),
        (
            "full,snapkv:budget=1024,window=32+k8v4,k4v2,streaming:sinks=4,budget=50%",
            ["full", "snapkv:budget=1024,window=32+k8v4", "k4v2", "streaming:sinks=4,budget=50%"],
        ),
        ("a:x=1,b+c,d:y=2,z=3", ["a:x=1", "b+c", "d:y=2,z=3"]),
        (r"a:path=one\,two,b", [r"a:path=one\,two", "b"]),
        ("a:x={1,2},y=3,b", ["a:x={1,2},y=3", "b"]),
        ("a:x={1,b,c}+{d,e},f", ["a:x={1,b,c}+{d,e}", "f"]),
        (r"a:path=x\{y,b", [r"a:path=x\{y", "b"]),
        ("a,,b", ["a", "", "b"]),
        ("x=1", ["x=1"]),
    ],
)
def test_a_comma_before_a_name_starts_the_next_policy(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
VALUES = st.from_regex(r"[a-z0-9.%:=]{0,6}", fullmatch=True)
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=3)
PARTS = st.builds(
    lambda name, options: (
        f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name
    ),
    NAMES,
    OPTIONS,
)
SPECS = st.lists(PARTS, min_size=1, max_size=3).map("+".join)


@given(st.lists(SPECS, min_size=1, max_size=4))
def test_a_list_of_any_policies_splits_into_them_again(specs: list[str]) -> None:
    assert split_specs(",".join(specs)) == specs


def test_full_comes_first_and_texts_become_canonical() -> None:
    assert read_specs(["k4v2,raw"]) == (FULL, "k4v2", "raw")
    assert read_specs(["k4v2", "full", "raw"]) == (FULL, "k4v2", "raw")
    assert read_specs(["full"]) == (FULL,)
    assert read_spec("full") == FULL


@pytest.mark.parametrize("text", ["", "k8v4,", ",k8v4", "k8v4,,k4v2"])
def test_an_empty_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="has an empty item"):
        read_specs([text])


def test_a_policy_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="the policy k8v4 is named twice"):
        read_specs(["k8v4", "raw,k8v4"])


def test_an_unknown_policy_lists_what_there_is() -> None:
    with pytest.raises(UnknownPolicyError, match=r"'nope'; installed policies: .*k8v4.*`full`"):
        read_specs(["nope"])


@pytest.mark.parametrize(
    ("grid", "specs"),
    [
        ("k8v4", ["k8v4"]),
        ("a:rate={2,4,8}+k8v4", ["a:rate=2+k8v4", "a:rate=4+k8v4", "a:rate=8+k8v4"]),
        ("{a,b}:x={1,2}", ["a:x=1", "a:x=2", "b:x=1", "b:x=2"]),
        ("a:x={1}", ["a:x=1"]),
        (r"a:path=\{y\},x={1,2}", [r"a:path=\{y\},x=1", r"a:path=\{y\},x=2"]),
    ],
)
def test_a_grid_stands_for_every_choice(grid: str, specs: list[str]) -> None:
    assert expand(grid) == specs


@pytest.mark.parametrize("grid", ["a:x={1,2", "a:x=1}", "a:x={1,{2,3}}", "}{"])
def test_a_brace_needs_its_other(grid: str) -> None:
    with pytest.raises(ValueError, match="has an unbalanced brace"):
        expand(grid)


def test_grids_are_read_into_policies() -> None:
    found = read_specs(["kv-compress:rate={2,4}+k{8,4}v4,k4v2"])
    assert found == (FULL, *map(read_spec, expand("kv-compress:rate={2,4}+k{8,4}v4")), "k4v2")
    assert len(found) == 6
    with pytest.raises(ValueError, match="the policy k8v4 is named twice"):
        read_specs(["k{8,4}v4,k8v4"])
    with pytest.raises(ValueError, match="has an empty item"):
        read_specs(["{k8v4,}"])
