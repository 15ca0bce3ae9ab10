"""The tables of the documentation that compare with peers, written from the benchmark's result.

`python -m tools.peers` puts them into the page; the tests fail where one is not as it would be
written. What stands between them is prose and stays.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "peers.json"
PAGE: Final = ROOT / "docs" / "benchmarks.md"
SECTION: Final = re.compile(r"(?<=\n## peers\n).*?(?=\n## )", re.DOTALL)
TABLE: Final = re.compile(r"^\|.*\|$(?:\n\|.*\|$)*", re.MULTILINE)
SCORES: Final = {
    "needle": "needles found",
    "multikey": "of four numbers the one that was asked for, found",
    "nll": "nats a token over the full cache's",
    "agreement": "share of tokens that the full cache answers, too",
}
SETTINGS: Final = {"aware": "question in the prompt", "agnostic": "question after it"}
ASKED: Final = frozenset({"needle", "multikey"})  # the others have no question
PROGRAMS: Final = {
    "ours": "ours",
    "quantized": "transformers",
    "vllm": "vLLM",
    "kvpress": "kvpress",
    "kvzip": "kvpress",
}

Row = Mapping[str, Any]


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Writes a table of Markdown."""
    rows = (head, ("---",) * len(head), *lines)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows).replace("| --- ", "|---")


def named(way: str) -> str:
    """Names a way of "ENVIRONMENT: WAY" with the program that it is of; ours without one."""
    environment, _, spec = way.partition(": ")
    return f"`{spec}`" if environment == "ours" else f"{PROGRAMS[environment]} `{spec}`"


def percent(share: float) -> str:
    """Writes a budget, as in `12.5 %`."""
    return f"{100 * share:g} %"


def cell(task: str, setting: str) -> str:
    """Names a task and its setting, where it has two."""
    return f"{task}, {SETTINGS[setting]}" if task in ASKED else task


def figures(chosen: Iterable[Row]) -> str:
    """Writes the figures, with the ways that they are of."""
    lines = []
    for row in chosen:
        task, setting, budget = row["task"], row["setting"], row["budget"]
        what = ", ".join((SCORES[task], *([SETTINGS[setting]] if task in ASKED else [])))
        for side, name in (("ours", "ours"), ("peer", "best_peer")):
            lines.append(
                (
                    f"`{task}_{setting}_{name}_{int(100 * budget)}`",
                    f"{what}, at most {percent(budget)} of the bytes, {named(row[f'{side}_way'])}",
                    f"{row[side]:.4f}",
                )
            )
    return table(("figure", "what it is", "value"), lines)


def wins(chosen: Iterable[Row]) -> str:
    """Writes who is better at each budget."""
    head = ("task", "bytes", "ours", "held", "score", "theirs", "held", "score", "difference")
    lines = []
    for row in chosen:
        sides = []
        for side in ("ours", "peer", "freed"):
            sides += [named(row[f"{side}_way"]), f"{row[f'{side}_held']:.3f}", f"{row[side]:.3f}"]
        low, high = row["difference"]
        better = {"ours": "ours", "peer": "theirs", "equal": "equal"}[row["winner"]]
        spread = f"{low:.2f} to {high:.2f}"
        if row["task"] == "nll":
            spread = f"{low:.3f} to {high:.3f}"
        about = (cell(row["task"], row["setting"]), percent(row["budget"]))
        lines.append((*about, *sides[:6], spread, better, sides[6], sides[8]))
    return table((*head, "wins", "if freed", "score"), lines)


def everything(rows: Sequence[Row]) -> str:
    """Writes all ways' scores, and the most that each held."""
    found = [row for row in rows if row["kind"] in ("way", "failed")]
    cells = list(dict.fromkeys((row["task"], row["setting"]) for row in found))
    cells.sort(key=lambda each: (list(SCORES).index(each[0]), list(SETTINGS).index(each[1])))
    lines = []
    for environment in PROGRAMS:
        mine = [row for row in found if row["environment"] == environment]
        for way in dict.fromkeys(row["way"] for row in mine):
            of = {(row["task"], row["setting"]): row for row in mine if row["way"] == way}
            held = max((row["held"] for row in of.values() if "held" in row), default=None)
            scores = [_score(of.get(each)) for each in cells]
            share = "" if held is None else f"{held:.3f}"
            lines.append((PROGRAMS[environment], f"`{way}`", share, *scores))
    return table(("by", "way", "held", *(cell(*each) for each in cells)), lines)


def _score(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row['score']:.3f}" if row["kind"] == "way" else "failed"


def tables(result: Row) -> tuple[str, str, str]:
    """Gives the tables in the order of the page."""
    rows = result["rows"]
    chosen = [row for row in rows if row["kind"] == "choice"]
    chosen.sort(
        key=lambda row: (
            list(SCORES).index(row["task"]),
            list(SETTINGS).index(row["setting"]),
            -row["budget"],
        )
    )
    return figures(chosen), wins(chosen), everything(rows)


def shown(page: str) -> list[str]:
    """Gives the tables that a page shows."""
    (section,) = SECTION.findall(page)
    return TABLE.findall(section)


def renewed(page: str, result: Row) -> str:
    """Puts the tables of a result into a page."""
    fresh = iter(tables(result))
    return SECTION.sub(lambda section: TABLE.sub(lambda _: next(fresh), section[0]), page)


def main() -> None:
    """Renew the page."""
    result = json.loads(RESULT.read_text())
    PAGE.write_text(renewed(PAGE.read_text(), result))


if __name__ == "__main__":
    main()
