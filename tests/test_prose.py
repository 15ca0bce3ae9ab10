"""A figure in running text is one that a result holds, or is said here not to be measured.

Looked at are numbers with a decimal point and percentages, outside of code, tables and links. On
the page of a benchmark its result must hold them, on other pages any result.
"""

import json
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tools.pages import ROOT, pages
from tools.tables.markdown import TABLE
from tools.tables.page import RESULTS, page_of, path_of, result
from tools.tables.page import measured as names

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# What looks like a figure and is none: code, the targets of links, versions, papers, their parts.
OTHERWISE = re.compile(
    r"`[^`]*`|\]\([^)]*\)|https?://\S+|arXiv:\d{4}\.\d{5}|[Ss]ection \d\.\d|Apache-2\.0"
    r"|(?:vLLM,?|Python|torch|[Tt]riton|transformers)(?: from)?\s\d\.\d+(?: to \d\.\d+)?"
)
NUMBER = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(?: (%))?(?![\w%]|\.\d)")
# Of a benchmark or a page: what was not measured, with what it is.
STATED = {
    "gate": {"95 %": "what intervals are of"},
    "levels": {"95 %": "what intervals are of"},
    "levels_fitted": {"95 %": "what intervals are of"},
    "quest_quality": {"95 %": "what intervals are of"},
    "recommend": {"95 %": "what intervals are of"},
    "rotation": {"95 %": "what intervals are of"},
    "ruler": {"95 %": "what intervals are of"},
    "peers": {"95 %": "what intervals are of", "78 %": "of policies", "88 %": "of policies"},
    "vllm_nll": {"95 %": "what intervals are of"},
    "vllm_throughput": dict.fromkeys(("1.9", "1.2", "1.8", "5 %"), "asked for"),
    "vllm_throughput_amx": {"1.2": "asked for", "1.8": "asked for"},
    "zack_quality": {"69 %": "of the paper"},
    "docs/calibrate.md": {
        **dict.fromkeys(("0.05", "0.1", "0.5", "5 %", "20 %", "10 %", "1 %"), "the paper's grid"),
        "0.4": "an example",
    },
    "docs/decisions/0007-leankv-in-one-reading.md": {
        **dict.fromkeys(("5 %", "0.05", "0.0005"), "what the paper's words would mean"),
    },
    "docs/methods/leankv.md": {"0.001": "a parameter"},
    "docs/methods/expected-attention.md": {"0.01": "a parameter of kvpress"},
    "docs/methods/zigzagkv.md": {"0.5": "a default"},
    "docs/methods/headkv.md": {"1.005": "a parameter of the authors"},
    "docs/methods/index.md": {"80 %": "how pictures are drawn"},
    "docs/tutorials/serve.md": {"0.92": "vLLM's default"},
    "packages/kv-evict/README.md": {"0.001": "a parameter"},
}

OTHERS = sorted({*pages()} - {str(path_of(name).relative_to(ROOT)) for name in names()})
SECTIONS = {name: page_of(name) for name in names()}


def figures(text: str) -> Iterator[str]:
    """The figures of running text, in its order."""
    plain = OTHERWISE.sub(" ", TABLE.sub("", FENCED.sub("", text)))
    for number, percent in NUMBER.findall(plain):
        if percent or "." in number:
            yield f"{number} %" if percent else number


def numbers(value: object) -> Iterator[float]:
    """All numbers in JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def holds(figure: str, found: list[float]) -> bool:
    """Whether a number is the figure when it is rounded to its digits; bytes may be megabytes."""
    number, _, percent = figure.partition(" ")
    wanted, digits = float(number.replace(",", "")), len(number.partition(".")[2])
    half = 0.500001 * 10**-digits
    given = [
        *found,
        *(100 * value if percent else value / 1e6 for value in found if percent or value >= 1e6),
    ]
    return any(abs(value - wanted) <= half for value in given)


@cache
def measured(name: str) -> list[float]:
    """All numbers of a result, and those that its page works out of them."""
    whole = result(name)
    return [*numbers(whole["summary"]), *numbers(whole["rows"]), *worked_out(name)]


def worked_out(name: str) -> Iterator[float]:
    """What running text says that stands in no row by itself."""
    if name == "vllm_parts":  # the share of time that steps with prompts take
        for row in result(name)["rows"]:
            if row["kind"] == "parts":
                parts = {
                    key: value for key, value in row.items() if re.search("_(prompt|decode)$", key)
                }
                prompts = sum(value for key, value in parts.items() if key.endswith("_prompt"))
                yield prompts / sum(parts.values())
    if name == "cpu_end_to_end":  # steps of leankv over those of k4v2, of raw over those of k8v4
        seconds = {
            (row["spec"], row["batch"], row["tokens"]): row["seconds"]
            for row in result(name)["rows"]
            if row["kind"] == "decode"
        }
        over = {"leankv:t_high=0.2": "k4v2", "raw": "k8v4"}
        for (spec, *size), taken in seconds.items():
            if spec in over:
                yield taken / seconds[over[spec], *size]
    if name == "peers_times":  # what the ways that are timed hold
        yield from (row["held"] for row in result("peers")["rows"] if row["kind"] == "way")


@cache
def any_measured() -> list[float]:
    return [each for path in RESULTS.glob("*.json") for each in measured(path.stem)]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_benchmarks_page_says_what_its_result_holds(name: str) -> None:
    stated = STATED.get(name, {})
    wrong = [f for f in figures(SECTIONS[name]) if f not in stated and not holds(f, measured(name))]
    assert not wrong, f"no number of {name}.json is {wrong}"


@pytest.mark.parametrize("page", OTHERS)
def test_a_page_says_what_some_result_holds(page: str) -> None:
    stated = STATED.get(page, {})
    text = (ROOT / page).read_text()
    wrong = [f for f in figures(text) if f not in stated and not holds(f, any_measured())]
    assert not wrong, f"no result holds {wrong}; a figure comes from one, or is stated in this test"


@pytest.mark.parametrize("where", STATED)
def test_what_is_stated_is_still_there(where: str) -> None:
    text = SECTIONS.get(where) or (ROOT / where).read_text()
    assert {*STATED[where]} <= {*figures(text)}


def test_figures_of_running_text() -> None:
    text = "\n| 1.5 |\n\nIt is 0.39 of `2.5`, 12,345.5 or 7 % ([x 3.5](a4.5)), vLLM 0.32, 16 of 20."
    assert list(figures(text)) == ["0.39", "12,345.5", "7 %", "3.5"]


def test_a_figure_is_a_number_that_was_rounded() -> None:
    found = list(numbers(json.loads('{"a": [0.386, {"b": 11900000}], "c": "0.9", "d": true}')))
    assert found == [0.386, 11900000.0]
    assert holds("0.39", found)
    assert holds("38.6 %", found)
    assert holds("11.9", found)
    assert not holds("0.38", found)
    assert not holds("0.9", found)
    assert not holds("0.01", [10_000.0])
