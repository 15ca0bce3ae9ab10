"""Puts the tables of all results into the page of benchmarks: `python -m tools.tables`."""

from tools.tables.page import PAGE, renew

if __name__ == "__main__":
    PAGE.write_text(renew(PAGE.read_text()))
