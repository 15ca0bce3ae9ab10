# environment: vllm
"""Models with layers that vLLM keeps (windows, chunks, states) beside those under a policy.

Tiny models with random weights, on a CPU. One policy of each storage: tokens in vLLM's slots, and
in pages. `equal` says whether a policy that keeps everything as it is gives the tokens of vLLM
alone, greedily and in float32 (bfloat16 where vLLM needs it); if a model does not run, the row says
who refuses it. `stated` are the tokens that vLLM reports under `way` in bfloat16, and `formula`
those that follow from the bytes of a request: layers of full attention compressed, and all other
layers as vLLM alone has them.
"""

import argparse
from functools import partial
from typing import Final

from _vllm_models import MODELS, ran
from _vllm_process import Row, Rows, apart

# How tokens are stored: a policy, and one that keeps everything.
STORED: Final = {
    "slots": ("k8v4", "raw"),
    "pages": ("kv-compress:rate=4+k8v4", "streaming:budget=32768"),
}


def measure(names: list[str], *, quick: bool) -> Rows:
    """Run every model under vLLM alone and under policies."""
    rows = Rows("vllm_models", {"models": names}, quick=quick)
    for name in names:
        for stored, (way, keeping) in STORED.items():
            key: Row = {"model": name, "stored": stored, "way": way}
            rows.measured(key, partial(apart, ran, name, way, keeping))
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """Models with equal tokens, and capacity over that of the formula."""
    found: dict[str, float] = {}
    for stored, tail in (("slots", ""), ("pages", "_pages")):
        own = [row for row in rows if row["stored"] == stored]
        found[f"vllm_equal{tail}"] = float(sum(row["equal"] is True for row in own))
        found |= {
            f"capacity_over_formula{tail}_{row['model']}": float(str(row["stated"]))
            / float(str(row["formula"]))
            for row in own
            if row["runs"]
        }
    return found


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    rows = measure(["gemma3"] if quick else list(MODELS), quick=quick)
    rows.finish(figures(rows.rows))


if __name__ == "__main__":
    main()
