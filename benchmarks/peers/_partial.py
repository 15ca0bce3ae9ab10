"""What has been answered, on disk row by row, so that a later run goes on from here."""

import json
from collections import defaultdict
from pathlib import Path

from _work import Key, Row


class Partial:
    """Rows by environment, in a file whose first line says of which samples and model.

    A row keeps the commit that it was measured with: hours of answers outlive a commit.
    """

    def __init__(self, path: Path | None, asked: Row) -> None:
        """Take over the rows of a file, if it is there; without a path nothing is kept.

        Raises:
            ValueError: the file is of other samples or of another model.
        """
        self._path = path
        self.rows: dict[str, dict[Key, Row]] = defaultdict(dict)
        self.versions: dict[str, dict[str, str]] = {}
        if path is None:
            return
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asked) + "\n")
            return
        text = path.read_text()
        first, *lines = text[: text.rfind("\n") + 1].splitlines()
        if json.loads(first) != asked:
            raise ValueError(f"{path} is of {first}, and asked is {asked}: move it away")
        path.write_text("".join(f"{line}\n" for line in (first, *lines)))  # without a line cut off
        for line in lines:
            self._keep(json.loads(line))

    def take(self, environment: str, commit: str, row: Row) -> None:
        """Keep a row that a script printed."""
        line = {"environment": environment, "commit": commit, **row}
        self._keep(line)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def done(self, environment: str) -> frozenset[Key]:
        """Which rows are there."""
        return frozenset(self.rows[environment])

    def remove(self) -> None:
        """Delete the file; the result has been written."""
        if self._path is not None:
            self._path.unlink()

    def _keep(self, line: Row) -> None:
        environment = line["environment"]
        if "versions" in line:
            self.versions[environment] = line["versions"]
            return
        key = (line["way"], line["task"], line["setting"], line["sample"])
        self.rows[environment][key] = line
