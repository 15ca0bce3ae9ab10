"""Writes the tables of all results into their pages, and the summary: `python -m tools.tables`."""

from kv_policy.files import write_whole
from tools.tables import summary
from tools.tables.page import measured, path_of, renew

if __name__ == "__main__":
    for name in measured():
        write_whole(path_of(name), renew(name).encode())
    for path in (summary.PAGE, *summary.FIRST):
        write_whole(path, summary.written(path.read_text()).encode())
