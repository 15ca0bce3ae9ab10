"""Writes the tables of all results into the benchmarks page: `python -m tools.tables`."""

from kv_policy.files import write_whole
from tools.tables.page import PAGE, renew

if __name__ == "__main__":
    write_whole(PAGE, renew(PAGE.read_text()).encode())
