"""Tables that compare with peers."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tools.tables.markdown import Row, Said, number, only_figures, table

SCORES: Final = {
    "needle": "needles found",
    "multikey": "the requested one of four numbers, found",
    "nll": "nats a token over the full cache's",
    "agreement": "share of tokens equal to the full cache's",
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


def named(way: str) -> str:
    """Return the name of a "ENVIRONMENT: WAY" with its program; ours without one."""
    environment, _, spec = way.partition(": ")
    return f"`{spec}`" if environment == "ours" else f"{PROGRAMS[environment]} `{spec}`"


def percent(share: float) -> str:
    """Write a budget, as in `12.5 %`."""
    return f"{100 * share:g} %"


def cell(task: str, setting: str) -> str:
    """Return a task with its setting, if it has two."""
    return f"{task}, {SETTINGS[setting]}" if task in ASKED else task


def figures(chosen: Iterable[Row]) -> str:
    """Write the figures, with the policies they belong to."""
    lines = []
    for row in chosen:
        task, setting, budget = row["task"], row["setting"], row["budget"]
        what = ", ".join((SCORES[task], *([SETTINGS[setting]] if task in ASKED else [])))
        for side, name in (("ours", "ours"), ("peer", "best_peer")):
            by = f"at most {percent(budget)} of the bytes, {named(row[f'{side}_way'])}"
            figure = f"{task}_{setting}_{name}_{int(100 * budget)}"
            lines.append((f"{what}, {by} <!-- {figure} -->", number(row[side])))
    return table(("figure", "value"), lines)


def wins(chosen: Iterable[Row]) -> str:
    """Write the better side at each budget."""
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
    """Write all scores, and the maximum bytes of each policy."""
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


def peers(result: Row, said: Said) -> Iterator[str]:
    """Yield the figures, the comparison, and all policies."""
    rows = result["rows"]
    chosen = [row for row in rows if row["kind"] == "choice"]
    chosen.sort(
        key=lambda row: (
            list(SCORES).index(row["task"]),
            list(SETTINGS).index(row["setting"]),
            -row["budget"],
        )
    )
    yield figures(chosen)
    yield wins(chosen)
    yield everything(rows)


WRITERS: Final = {"peers": peers, "peers_times": only_figures}
