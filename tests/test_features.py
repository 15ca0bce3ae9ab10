"""The documented table of vLLM's features is that of the list which tests inside vLLM read."""

from kv_serve.features import FEATURES
from tools.features import BLOCK, PAGE, written


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert len(BLOCK.findall(text)) == 1
    assert written(text) == text, "run python -m tools.features"


def test_a_feature_is_listed_once() -> None:
    names = [each.name for each in FEATURES]
    assert len({*names}) == len(names)
