# environment: vllm
"""Nats per token while generating under vLLM, beside the same texts under transformers.

SmolLM2-135M, 16 texts of 2,000 tokens, of which the next 256 are scored. Each text is generated:
a logits processor lets vLLM take the true next token, whatever the model would have said, and what
is scored is the log-probability before that. So tokens come one by one over a cache that is
compressed, in both hosts, also where a policy lets go of tokens; log-probabilities of prompts, of
which `vllm_quality` has some, say nothing of that.

What transformers scored is taken from `vllm_quality`'s result: the same samples. Intervals are of
95 %, of mean differences sample by sample.
"""

from functools import partial
from pathlib import Path
from statistics import mean
from typing import cast

import _result
from _vllm_forced import nats, room_for
from _vllm_load import raw_token_bytes
from _vllm_process import Row, Rows, apart
from _vllm_quality import interval
from _vllm_ways import BF16, FP8, arguments, figure, with_basis
from vllm_quality import POLICIES, plans

from kv_eval.tasks import default_text
from kv_transformers.from_text import FULL
from kv_transformers.models import load_model


def under_transformers() -> dict[str, list[float]]:
    """What the same samples scored there, by policy.

    Raises:
        FileNotFoundError: the benchmark `vllm_quality` has not been run.
    """
    rows = _result.rows_of("vllm_quality")
    (found,) = (row for row in rows if row.get("task") == "nll" and row["kind"] == "transformers")
    return {name: scores for name, scores in found.items() if isinstance(scores, list)}


def measure(
    policies: list[str], basis: Path | None, *, quick: bool, minutes: float | None = None
) -> Rows:
    """Score all texts under every policy."""
    policies = list(with_basis(policies, basis))
    loaded = load_model()
    (plan,) = (each for each in plans(policies, quick=quick) if each.tasks[0] == "nll")
    samples = plan.samples_of(loaded, default_text(), *plan.pairs[0])
    room = room_for(samples, raw_token_bytes())
    rows = Rows("vllm_nll", {"policies": policies, "plan": str(plan)}, quick=quick, minutes=minutes)
    for way in (BF16, *(() if quick else (FP8,)), *plan.policies[1:]):
        key: Row = {"kind": "vllm", "way": figure(way), "length": plan.length}
        rows.measured(key, partial(apart, nats, way, room, samples))
    return rows


def over(mine: list[float], base: list[float]) -> tuple[float, list[float]]:
    """The mean difference, with its interval."""
    found = [a - b for a, b in zip(mine, base, strict=True)]
    return mean(found), list(interval(found))


def compared(rows: list[Row], theirs: dict[str, list[float]]) -> list[Row]:
    """For each policy, nats over the uncompressed cache of each host, and between the two."""
    ours = {str(row["way"]): cast(list[float], row["nats"]) for row in rows}
    table: list[Row] = []
    for way, mine in ours.items():
        row: Row = {"kind": "over", "way": way, "score": mean(mine)}
        row["vllm"], row["vllm_interval"] = over(mine, ours[BF16])
        other = theirs.get(FULL if way == BF16 else way)
        if other is not None:  # fp8 is vLLM's alone
            row["transformers"], row["transformers_interval"] = over(other, theirs[FULL])
            row["between"], row["between_interval"] = over(mine, other)
        table.append(row)
    return table


def figures(table: list[Row]) -> dict[str, float]:
    """Nats over bfloat16 under vLLM, and how far vLLM is from transformers."""
    found = {}
    for row in table:
        if row["way"] == BF16:
            found["bf16"] = float(str(row["score"]))
        else:
            found[f"{row['way']}_over_bf16"] = float(str(row["vllm"]))
        if "between" in row:
            found[f"{row['way']}_over_transformers"] = float(str(row["between"]))
    return found


def main() -> None:
    """Run everything and write the result."""
    given = arguments(__doc__, POLICIES).parse_args()
    theirs = {} if given.quick else under_transformers()  # before hours are spent
    rows = measure(given.policies, given.basis, quick=given.quick, minutes=given.minutes)
    table = compared(rows.rows, theirs)
    rows.rows += table
    rows.finish(figures(table))


if __name__ == "__main__":
    main()
