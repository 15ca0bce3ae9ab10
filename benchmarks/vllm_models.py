# environment: vllm
"""Models with layers that vLLM keeps (windows, chunks, states) beside those under a policy.

Tiny models with random weights, on a CPU. `equal` says whether the policy `raw` gives the tokens of
vLLM alone, greedily and in float32 (bfloat16 where vLLM needs it); if a model does not run, the row
says who refuses it. `stated` are the tokens that vLLM reports under `k8v4` in bfloat16, and
`formula` those that follow from the bytes of a request: layers of full attention compressed, and
all other layers as vLLM alone has them.
"""

import argparse
from functools import partial

from _vllm_models import MODELS, ran
from _vllm_process import Row, Rows, apart

POLICY = "k8v4"


def measure(names: list[str], *, quick: bool) -> Rows:
    """Run every model under vLLM alone and under policies."""
    rows = Rows("vllm_models", {"models": names}, quick=quick)
    for name in names:
        key: Row = {"model": name, "way": POLICY}
        rows.measured(key, partial(apart, ran, name, POLICY))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Models with equal tokens, and capacity over that of the formula."""
    equal = sum(row["equal"] is True for row in rows)
    return {"vllm_equal": float(equal)} | {
        f"capacity_over_formula_{row['model']}": float(str(row["stated"]))
        / float(str(row["formula"]))
        for row in rows
        if row["runs"]
    }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    rows = measure(["gemma3"] if quick else list(MODELS), quick=quick)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
