"""What has been answered, on disk row by row, so that a later run goes on from here."""

import json
import sys
from collections import defaultdict
from pathlib import Path

from _work import Key, Row

from kv_eval.evaluate.records import Records


class Partial:
    """Rows by environment, in a file that says of which samples and model they are.

    A row keeps the commit that it was measured with: hours of answers outlive a commit.
    """

    def __init__(self, path: Path | None, asked: Row) -> None:
        """Take over the rows of a file, if it is there; without a path nothing is kept.

        A file of other samples or of another model is set aside, which is said on standard error.
        """
        self._records: Records | None = None
        self.rows: dict[str, dict[Key, Row]] = defaultdict(dict)
        self.versions: dict[str, dict[str, str]] = {}
        if path is None:
            return
        if not path.exists():
            self._records = Records.start(path, asked)
            return
        self._records, wrong = Records.resume(path, asked)
        if wrong:
            print(wrong, file=sys.stderr)
        for row in self._records.lines:
            self._keep(json.loads(row))

    def take(self, environment: str, commit: str, row: Row) -> None:
        """Keep a row that a script printed."""
        line = {"environment": environment, "commit": commit, **row}
        self._keep(line)
        if self._records is not None:
            self._records.append([json.dumps(line, allow_nan=False).encode()])

    def done(self, environment: str) -> frozenset[Key]:
        """Which rows are there."""
        return frozenset(self.rows[environment])

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        if self._records is not None:
            self._records.remove()

    def _keep(self, line: Row) -> None:
        environment = line["environment"]
        if "versions" in line:
            self.versions[environment] = line["versions"]
            return
        key = (line["way"], line["task"], line["setting"], line["sample"])
        self.rows[environment][key] = line
