"""The conformance check accepts lawful policies, and detects texts that do not parse back."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from kv_policy import Budget, CacheShape, Part, Raw
from kv_policy.testing import check_policy
from lawful import Good, refusal


def test_a_good_policy_passes() -> None:
    check_policy(Good())
    check_policy(Good(Budget(3)), CacheShape(1, 1, 1, 8, 8))
    check_policy(Raw(), CacheShape(1, 1, 1, 3, 5, torch.float16))


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
        (Text, "parsing good:sinks=4 returns Text"),
        (Name, "better does not start with its name, good"),
        (Keys, "the parameters of good:sink=3 cannot be parsed"),
    ],
)
def test_a_broken_policy_is_told_its_law(broken: type[Good], law: str) -> None:
    assert law in refusal(broken())


def test_registered_parts_must_parse_back_equal(register: Callable[..., None]) -> None:
    @dataclass(frozen=True)
    class Other(Good):
        pass

    register(Other)  # another class has the name
    with pytest.raises(AssertionError, match="not equal to"):
        check_policy(Good())
    register(Good)
    check_policy(Good())


def test_what_is_no_policy_is_told_so() -> None:
    with pytest.raises((AssertionError, TypeError), match="KVPolicy"):
        check_policy("k8v4")

    class Nothing(Part):
        name = "nothing"

    with pytest.raises(
        AssertionError, match="nothing supplies no selector, no formats, no basis and no reading"
    ):
        check_policy(Nothing())


def test_the_checks_stay_out_of_what_users_import() -> None:
    code = "import sys, kv_policy; print({'kv_policy.testing', 'hypothesis'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
