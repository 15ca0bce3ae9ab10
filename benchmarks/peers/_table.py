"""From rows of samples to scores, to the choice at each budget, to figures."""

from collections.abc import Callable, Collection, Sequence
from statistics import fmean

from _choose import BUDGETS, Candidate, best, winner
from _partial import Partial
from _samples import CellName, Samples
from _ways import REFERENCE, WAYS, asked, claimed
from _work import FULL, Row

from kv_eval.evaluate.intervals import of_change
from kv_eval.tasks import Sample, agreement_share, found_share

OURS = "ours"
LEAST = frozenset({"nll"})  # tasks whose score is the better the lower it is
ASKED = frozenset({"needle", "multikey"})  # tasks whose score is not over the full cache's
Decode = Callable[[Sequence[int]], str]


def score(sample: Sample, row: Row, full: Row | None, decode: Decode) -> float | None:
    """1 or 0 for a number, the share of equal tokens, or nats per token over the full cache.

    `full` is the row of the uncompressed cache of the same program; None where it is not there, and
    nothing can be compared with it.
    """
    if sample.answers:
        return found_share(decode(row["tokens"]), sample.answers)
    if full is None:
        return None
    if sample.target_ids:
        return float(row["nats"] - full["nats"])
    return agreement_share(row["tokens"], full["tokens"])


def lacking(table: Sequence[Row], cell: CellName, quick: bool) -> dict[str, tuple[str, ...]]:
    """The ways that a cell still lacks, of each environment that lacks some."""
    found = {(row["environment"], row["way"]) for row in table if "way" in row}
    left = {}
    for environment in WAYS:
        ways = asked(environment, cell[1], quick=quick)
        left[environment] = tuple(way for way in ways if (environment, way) not in found)
    return {environment: ways for environment, ways in left.items() if ways}


def missing(table: Sequence[Row], cell: CellName, quick: bool) -> list[str]:
    """What a cell still lacks, in words."""
    return [
        f"{' '.join(cell)}: {len(ways)} of {len(asked(environment, cell[1], quick=quick))} "
        f"ways of {environment}"
        for environment, ways in lacking(table, cell, quick).items()
    ]


def to_ask(before: Sequence[Row], cell: CellName, quick: bool) -> dict[str, tuple[str, ...]]:
    """What fills the gaps of a cell: ways, and the full caches that they are compared with."""
    left = lacking(_standing(before), cell, quick)
    if cell[0] not in ASKED:
        for environment in tuple(left):
            reference = REFERENCE.get(environment, environment)
            left[reference] = tuple(dict.fromkeys((FULL, *left.get(reference, ()))))
    return left


def _standing(before: Sequence[Row]) -> list[Row]:
    """Those rows of an earlier result whose ways need not be asked again."""
    return [
        row
        for row in before
        if row["kind"] == "failed" or (row["kind"] == "way" and "scores" in row)
    ]


def joined(fresh: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """What was answered now, and of an earlier result's cell the ways that were not asked again.

    Those without the score of each sample cannot be compared with others, and are left out.
    """
    now = {(row["environment"], row["way"]) for row in fresh if "way" in row}
    stay = [row for row in _standing(before) if (row["environment"], row["way"]) not in now]
    of = {row["environment"] for row in stay}
    about = [row for row in before if row["kind"] == "environment" and row["environment"] in of]
    return [*about, *stay, *fresh]


def cell_rows(
    fresh: Sequence[Row], before: Sequence[Row], cell: CellName, quick: bool
) -> list[Row]:
    """The rows of a cell: with the choice where none is missing; a whole one stays until then."""
    table = joined(fresh, before)
    if not missing(table, cell, quick):
        return [*table, *choices(table, cell)]
    return list(before) if any(row["kind"] == "choice" for row in before) else table


def ways(partial: Partial, samples: Samples, cell: CellName, decode: Decode) -> list[Row]:
    """A row for each way that answered a whole cell, with its scores, or with why it failed.

    Left out is what is compared with a full cache whose answers are not there.
    """
    table: list[Row] = []
    places = range(len(samples[cell]))
    for environment in WAYS:
        rows = partial.rows[environment]
        full_rows = partial.rows[REFERENCE.get(environment, environment)]
        for way in dict.fromkeys(key[0] for key in rows):
            each = [rows[way, *cell, i] for i in places if (way, *cell, i) in rows]
            if len(each) < len(places):
                continue
            head: Row = {"environment": environment, "way": way}
            head |= {"task": cell[0], "setting": cell[1]}
            failed = [row["error"] for row in each if "error" in row]
            if failed:
                table.append({"kind": "failed", **head, "samples": len(failed), "why": failed[0]})
                continue
            full = [full_rows.get((FULL, *cell, i)) for i in places]
            given = zip(samples[cell], each, full, strict=True)
            scored = [score(sample, row, base, decode) for sample, row, base in given]
            scores = [each for each in scored if each is not None]
            if len(scores) < len(places):
                continue
            table.append({"kind": "way", **head, "score": fmean(scores), **_held(each)})
            table[-1]["scores"] = scores
            if samples[cell][0].target_ids:
                table[-1]["nats"] = fmean(row["nats"] for row in each)
    return table


def _held(rows: Sequence[Row]) -> Row:
    """What a way holds; `held` is the most of any sample, by whichever count is the higher."""
    return {
        "held": max(max(r["kv_bytes"], r["storage_bytes"]) / r["full_bytes"] for r in rows),
        "accounted": fmean(r["kv_bytes"] / r["full_bytes"] for r in rows),
        "storages": fmean(r["storage_bytes"] / r["full_bytes"] for r in rows),
    }


def choices(table: Sequence[Row], cell: CellName) -> list[Row]:
    """For each budget the best of ours and the best of the peers, and which is better.

    `freed` is the best of the peers if those that hide tokens held only what they do not hide.
    """
    least = cell[0] in LEAST
    rows = [row for row in table if row["kind"] == "way" and row["way"] != FULL]
    ours = [_candidate(row) for row in rows if row["environment"] == OURS]
    peers = [_candidate(row) for row in rows if row["environment"] != OURS]
    freed = [_candidate(row, claimed(row["way"])) for row in rows if row["environment"] != OURS]
    found: list[Row] = []
    for budget in BUDGETS:
        mine, peer, other = (best(each, budget, least=least) for each in (ours, peers, freed))
        if mine is None or peer is None or other is None:
            continue
        row: Row = {"kind": "choice", "task": cell[0], "setting": cell[1], "budget": budget}
        for side, chosen in (("ours", mine), ("peer", peer), ("freed", other)):
            row |= {
                side: chosen.score,
                f"{side}_way": f"{chosen.environment}: {chosen.way}",
                f"{side}_held": chosen.held,
            }
        row["difference"] = of_change(mine.scores, peer.scores)  # 95 % of the mean
        row["winner"] = winner(mine.score, peer.score, least=least)
        found.append(row)
    return found


def _candidate(row: Row, held: float | None = None) -> Candidate:
    share = row["held"] if held is None else held
    return Candidate(row["environment"], row["way"], tuple(row["scores"]), share)


def figures(chosen: Sequence[Row]) -> dict[str, float]:
    """The scores at each budget; of nll, nats per token over the full cache."""
    found: dict[str, float] = {}
    for row in chosen:
        name, budget = f"{row['task']}_{row['setting']}", int(100 * row["budget"])
        found[f"{name}_ours_{budget}"] = row["ours"]
        found[f"{name}_best_peer_{budget}"] = row["peer"]
    return found


def environments(partial: Partial, cell: CellName) -> list[Row]:
    """What was installed, with which commits a cell was measured, and the minutes that it took."""
    found: list[Row] = []
    for name in WAYS:
        rows = [row for key, row in partial.rows[name].items() if key[1:3] == cell]
        if rows:
            found.append(
                {
                    "kind": "environment",
                    "environment": name,
                    "task": cell[0],
                    "setting": cell[1],
                    "versions": partial.versions.get(name, {}),
                    "commits": sorted({row["commit"] for row in rows}),
                    "minutes": round(sum(row.get("seconds", 0.0) for row in rows) / 60, 1),
                }
            )
    return found


def earlier(rows: Sequence[Row], about: Row) -> list[Row]:
    """The rows of an earlier result without the first, which says what it is about.

    Raises:
        ValueError: it is of other samples or of another model.
    """
    first, *others = rows
    if first != about:
        raise ValueError(
            f"the result that is there is of {first}, and asked is {about}: move it away"
        )
    return others


def of_cells(rows: Sequence[Row], cells: Collection[CellName]) -> list[Row]:
    """Those rows that are of some cells."""
    return [row for row in rows if (row["task"], row["setting"]) in cells]
