# environment: triton
"""Everything that a first GPU can tell, in one command and ten minutes.

`python benchmarks/gpu_first.py` needs torch and triton, no network, and none of our packages
installed; what else is installed (transformers, flash-attn, FlashInfer, vLLM) is measured too. The
parts, each in processes of their own and with a share of the time: what the card is; whether every
kernel is right; a short tuning of tiles; decode steps beside other projects'; launches and waits of
a step; `generate` at the shapes of an 8B model; vLLM.

A part that fails leaves its traceback in the result, and the others go on. The result is written
whole after each part, and the last lines say what falls short of what is asked. The exit code is 1
if a kernel is wrong, or a part could not be run at all, and 2 if there is no GPU.

`--rehearse` runs all of it on a CPU in Triton's interpreter, with tiny shapes, and writes nothing
to benchmarks/results.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Final

# Triton reads the first when it is imported, and processes of the parts inherit them.
os.environ.update(
    {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if "--rehearse" in sys.argv
    else {}
)

import _bare
import _gpu_decode
import _gpu_figures
import _gpu_generate
import _gpu_right
import _gpu_rivals
import _gpu_steps
import _gpu_tiles
import _gpu_vllm
import _result
import torch
from _gpu_child import finite
from _gpu_parts import Part, Runner, fresh

WORK: Final = _bare.ROOT / "build" / "gpu_first"  # for logs, and a result that is not committed
NO_GPU: Final = (
    "there is no GPU that torch can use here; `--rehearse` tries this command without one"
)
NOT_REHEARSED: Final = ("vllm",)  # unless `--only` names it
# Cases of a rehearsal, of the parts that are not done whole.
REHEARSED_CASES: Final[dict[str, tuple[str, ...]]] = {
    "tune": ("choose",),
    "decode": ("64x16k", "skewed", "scores", "manager"),
    "rivals": ("torch", "torch, packed"),
    "steps": ("cache k8v4", "model kv-compress:rate=4+k8v4"),
    "generate": ("stock", "k8v4"),
}
TILES_BYTES: Final = 6e9  # that a process which compiles choices of tiles needs


def parts(*, quick: bool) -> list[Part]:
    """All parts, in order."""
    workers = 1 if quick else max(1, min(6, (os.cpu_count() or 2) - 1))
    room = 1 if quick else max(1, int(torch.cuda.mem_get_info()[0] / TILES_BYTES))
    compiling = tuple(f"compile {i}" for i in range(_gpu_tiles.COMPILING))
    found = [
        Part("machine", 20, ("versions", "copy")),
        Part("right", 120, _gpu_right.cases(quick=quick), together=workers),
        Part("tune", 50, compiling, together=min(workers, room)),
        Part("tune", 40, ("choose",)),
        Part("decode", 60, _gpu_decode.CASES),
        Part("rivals", 80, tuple(_gpu_rivals.RIVALS), alone=not quick),
        Part("steps", 50, _gpu_steps.CASES),
        Part("generate", 70, _gpu_generate.CASES, needs=("transformers",)),
        Part("vllm", 90, _gpu_vllm.CASES, alone=True, needs=("vllm",)),
    ]
    if not quick:
        return found
    few = []
    for each in found:
        wanted = REHEARSED_CASES.get(each.name, each.cases)
        cases = tuple(case for case in each.cases if case in wanted)
        few += [replace(each, cases=cases)] if cases else []
    return few


def commit() -> str:
    """What is measured; `unknown` where this is no checkout."""
    try:
        return _result.commit(replaced="gpu")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def close(rows: Sequence[dict[str, Any]], *, quick: bool) -> int:
    """Print the card, the figures and what falls short; return the exit code."""
    summary = _gpu_figures.figures(rows)
    print("\n== figures")
    for name, value in summary.items():
        print(f"  {name:40} {value:.4g}")
    broken = [row for row in rows if row["kind"] in ("failed", "died")]
    left = [row for row in rows if row["kind"] == "left out"]
    print(f"\n== failed ({len(broken)}), left out ({len(left)})")
    for row in (*broken, *left):
        what = row.get("what", row.get("case", ""))
        print(f"  {row['part']}: {what}: {row.get('error', row.get('why'))}"[:200])
    wrong = _gpu_figures.wrong(rows)
    print(f"\n== wrong ({len(wrong)})")
    for row in wrong:
        said = row.get("wrong") or row.get("error")
        print(f"  {row.get('case', '')} {row.get('what', '')}: {said}"[:200])
    if not quick:
        print("\n== short of what is asked")
        for line in _gpu_figures.short(summary) or ["  nothing"]:
            print(f"  {line}")
    print()
    for kind in ("card", "driver", "versions"):
        for row in _gpu_figures.of(rows, kind):
            said = {k: v for k, v in row.items() if k not in ("kind", "part") and v is not None}
            print(f"{kind}: {', '.join(f'{name} {value}' for name, value in said.items())}")
    checked = _gpu_figures.of(rows, "right")
    dead = quick and bool(broken)  # in a rehearsal nothing may fail
    return 1 if wrong or not checked or dead else 0


def main() -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="for everything")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", help="parts; the result stays in the folder of logs")
    parser.add_argument("--work", type=Path, default=WORK, help="the folder of logs")
    parser.add_argument("--out", type=Path, help="the result's folder: benchmarks/results")
    given = parser.parse_args()
    quick = given.rehearse
    if not quick and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    wanted = parts(quick=quick)
    names = list(dict.fromkeys(each.name for each in wanted))
    if unknown := sorted({*(given.only or ())} - {*names}):
        parser.error(f"no parts are named {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = given.only or [name for name in names if not (quick and name in NOT_REHEARSED)]
    whole = not quick and given.only is None
    folder = fresh(given.work.resolve())
    out = given.out or (_result.RESULTS if whole else folder)
    measured, tiles = commit(), folder / "tuned.json"

    def changed(rows: list[dict[str, Any]]) -> None:
        kept = [row for row in rows if row["kind"] != "begun"]
        summary = _gpu_figures.figures(kept)
        told: Any = finite({"rows": kept, "summary": summary})
        figures = {k: v for k, v in told["summary"].items() if isinstance(v, float)}
        _result.write("gpu", figures, told["rows"], quick=False, folder=out, measured=measured)

    settings = {_gpu_tiles.FILE: str(tiles), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    until = monotonic() + 60 * given.minutes
    runner = Runner(folder, until, quick, changed, settings)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends processes as Ctrl-C does
    try:
        runner.run([each for each in wanted if each.name in chosen])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    changed(runner.rows)
    code = close(runner.rows, quick=quick)
    print(f"result: {out / 'gpu.json'}; logs: {folder}")
    if tiles.exists() and not quick:
        where = "packages/kv-attention/src/kv_attention/gpu/tuned.json"
        print(f"to keep the tiles of this card: cp {tiles} {where}")
    return code if given.only is None or "right" in given.only else 0


if __name__ == "__main__":
    sys.exit(main())
