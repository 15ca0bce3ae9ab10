"""Adds up the reports that pytest left: prints `N passed, M failed, K skipped`."""

import sys
from pathlib import Path
from xml.etree import ElementTree


def count(reports: Path) -> tuple[int, int, int]:
    """Counts the tests that passed, failed (errors are failures) and were skipped."""
    suites = [
        suite
        for path in sorted(reports.glob("*.xml"))
        for suite in ElementTree.parse(path).getroot().iter("testsuite")
    ]
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors, skipped


if __name__ == "__main__":
    passed, failed, skipped = count(Path(sys.argv[1]))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
