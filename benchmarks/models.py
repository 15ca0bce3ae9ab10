"""Which architectures of transformers give the same tokens with a compressed cache: a row each.

A tiny random model of each in float32, with a batch of two prompts, one of them padded, is run with
its own cache and with a compressed one; `tools/models/check.py` says what is compared. A model is
`equal` if all of it agrees, `refused` if no compressed cache can be constructed for it, `refused
late` if one raises in a later pass, `wrong` if anything differs, and `unbuildable` if transformers
cannot build or run it small, or here.
"""

import argparse
import sys
from pathlib import Path

import _result
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # only this folder is on the path

from tools.models.build import architectures, with_variants
from tools.models.families import FEW
from tools.models.pool import checked
from tools.models.results import named, summary

LEFT_OUT = ("distinct", "measured", "seconds")  # which differ between machines
CONSOLE = Console(stderr=True)


def main() -> None:
    """Check all architectures and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few, and nothing is written")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time")
    given = parser.parse_args()
    names = [(name, "") for name in FEW] if given.quick else with_variants(architectures())
    rows = []
    for row in checked(names, given.processes):
        CONSOLE.print(f"{named(row)}: {row['result']} {row['said']}", highlight=False)
        rows.append({key: value for key, value in row.items() if key not in LEFT_OUT})
    rows.sort(key=lambda row: (row["architecture"], row["variant"]))
    _result.write("models", summary(rows), rows, quick=given.quick)


if __name__ == "__main__":
    main()
