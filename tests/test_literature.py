"""Every system that the surveys name is in the table of methods: here, or with a reason."""

import re

from tools.methods import FOLDER, ROOT, ours

NAMES = (ROOT / "tests" / "literature.txt").read_text().splitlines()
SECTION = (FOLDER / "index.md").read_text().split("\n## The literature\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| (.+) \|$", SECTION.partition("\n## ")[0], re.MULTILINE)[
    1:
]
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]+)?\)")


def test_the_table_has_every_name_once() -> None:
    assert sorted((system for system, _, _ in ROWS), key=str.casefold) == NAMES
    assert len(set(NAMES)) == len(NAMES)


def test_a_system_is_here_or_has_a_reason() -> None:
    for system, idea, here in ROWS:
        assert idea.strip(), system
        found = [(FOLDER / target).exists() for target in LINK.findall(here)]
        assert all(found), system
        assert found or len(here.removeprefix("left out: ").split()) > 3, system
        assert here.startswith("left out: ") or found, system


def test_a_method_named_as_a_paper_is_in_the_table() -> None:
    """The methods of this repository that no survey names, and why they are here."""
    others = {  # of later papers, of one's own, or formats
        "chunkkv", "expected-attention", "gate", "kv-compress", "kvzip", "r-kv", "keydiff", "lagkv",
        "vnorm", "quest", "tova", "knorm", "leankv", "zack", "svd-kv", "kq-svd", "palu", "hadamard",
        "raw", "bf16", "fp16", "fp32",
    }  # fmt: skip
    linked = {target.removesuffix(".md") for _, _, here in ROWS for target in LINK.findall(here)}
    methods = {name for name in ours() if not re.fullmatch(r"k\dv\d", name)}
    assert methods <= linked | others
