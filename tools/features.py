"""The table of vLLM's features in docs/serving.md, from the list that tests inside vLLM read.

`python -m tools.features` writes it; a test fails if it is out of date.
"""

import re
import sys
from pathlib import Path
from typing import Final

from kv_policy.files import write_whole
from kv_serve.features import FEATURES
from tools.tables.markdown import table

PAGE: Final = Path(__file__).parent.parent / "docs" / "serving.md"
BLOCK: Final = re.compile(r"^<!-- features -->\n.*?^<!-- end of features -->$", re.M | re.S)
HEAD: Final = ("feature", "asked for by", "one format for all tokens", "every other policy")


def features() -> str:
    """Return the table: what works, and what is refused, by how a policy stores tokens."""
    lines = [
        (
            f"{each.name} ({each.note})" if each.note else each.name,
            each.asked,
            *("yes" if works else "refused" for works in (each.slots, each.pages)),
        )
        for each in FEATURES
    ]
    return table(HEAD, lines)


def written(page: str) -> str:
    """Return a page with the table."""
    block = f"<!-- features -->\n\n{features()}\n\n<!-- end of features -->"
    return BLOCK.sub(lambda _: block, page)


if __name__ == "__main__":
    before = PAGE.read_text()
    after = written(before)
    if after != before:
        write_whole(PAGE, after.encode())
        print(f"wrote {PAGE.name}", file=sys.stderr)
