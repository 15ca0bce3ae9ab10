"""Check architectures: `python -m tools.models [--all] [NAME ...]`.

It fails if one is wrong, or is equal in the committed result and not here.
"""

import argparse
import sys
import time

from tools.models.build import architectures, with_variants
from tools.models.families import FEW
from tools.models.pool import checked
from tools.models.results import broken, named, rows


def main() -> int:
    """Run the check, with a line per architecture."""
    parser = argparse.ArgumentParser(prog="python -m tools.models", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="model types of transformers")
    parser.add_argument("--all", action="store_true", help="all of transformers, not a few of each")
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time")
    given = parser.parse_args()
    known = architectures()
    if unknown := sorted({*given.names} - {*known}):
        parser.error(f"transformers generates no text with {', '.join(unknown)}")
    names = with_variants(given.names or known)
    if not (given.names or given.all):
        names = [(name, "") for name in FEW if name in known]
    begin, found = time.perf_counter(), []
    for row in checked(names, given.processes):
        found.append(row)
        print(f"{row['seconds']:6.1f} s  {named(row)}: {row['result']}  {row['said']}")
    print(f"{len(found)} architectures in {time.perf_counter() - begin:.0f} s")
    wrong = broken(found, rows())
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
