"""What the documentation lists as refusals is what programs say."""

import re
from pathlib import Path

import pytest

from kv_policy import parse

PAGE = Path(__file__).parent.parent / "docs" / "troubleshooting.md"
TABLE = re.compile(r"^\| message \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
REFUSED = {
    "nothing": "unknown policy",
    "kv-compres": "unknown policy",
    "snapkv:budgt=3": "has no parameter",
    "snapkv:budget=0": "is refused",
    "k8v4+k4v2": "both define how tokens are stored",
    "leankv+k8v4": "both define how tokens are stored",
    "h2o+leankv": "both define which tokens are kept",
    "snapkv:budget=16": "is smaller than the",
    "kv-compress:keep=25%,budget=512": "both set how much is kept",
    "zack:file=none.safetensors,keep=80%": "does not exist",
}


def sayings() -> list[str]:
    found = TABLE.search(PAGE.read_text())
    assert found is not None
    return [row.split("|")[1].strip() for row in found[1].splitlines()]


@pytest.mark.parametrize("text", REFUSED)
def test_a_refusal_stands_in_the_table(text: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[text]) as caught:
        parse(text)
    forms = [re.escape(saying).replace(re.escape("..."), ".*") for saying in sayings()]
    found = [form for form in forms if re.fullmatch(form, str(caught.value), re.DOTALL)]
    assert any(REFUSED[text] in re.sub(r"\\(.)", r"\1", form) for form in found), str(caught.value)
