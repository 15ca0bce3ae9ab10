"""Sums up pytest reports: minutes of each, then `N passed, M failed, K skipped`."""

import sys
from pathlib import Path
from xml.etree import ElementTree


def suites_of(path: Path) -> list[ElementTree.Element]:
    """Read a report."""
    return list(ElementTree.parse(path).getroot().iter("testsuite"))


def minutes(reports: Path) -> dict[str, float]:
    """Return the minutes that the tests of each report took, longest first."""
    found = {
        path.stem: sum(float(suite.get("time", "0")) for suite in suites_of(path)) / 60
        for path in reports.glob("*.xml")
    }
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def count(reports: Path, pattern: str = "*.xml") -> tuple[int, int, int]:
    """Count the tests that passed, failed (including errors) and were skipped, in all reports."""
    suites = [suite for path in sorted(reports.glob(pattern)) for suite in suites_of(path)]
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    return tests - failures - errors - skipped, failures + errors, skipped


if __name__ == "__main__":
    for name, taken in minutes(Path(sys.argv[1])).items():
        print(f"{taken:6.1f} min  {name}")
    passed, failed, skipped = count(Path(sys.argv[1]))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
