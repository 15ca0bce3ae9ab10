"""`kv-serve policies` lists what is installed by kind, and help lists commands as they are run."""

import pytest
from typer.testing import CliRunner

from kv_policy import Part, Registry
from kv_serve.cli import ORDER, app
from kv_serve.cli.policies import GROUPS, collapse


def said(*given: str) -> str:
    run = CliRunner().invoke(app, given, env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    return run.output


def test_every_policy_is_under_the_heading_of_what_it_supplies() -> None:
    text = said("policies")
    titles = [title for title in GROUPS.values() if title in text]
    assert titles == list(GROUPS.values())
    parts = [text.split(title)[1].split("\n\n")[0] for title in titles]
    formats, selectors, both, bases, readings = (
        {line.split()[0] for line in x.splitlines() if line and not line[0].isspace()}
        for x in parts
    )
    assert {"raw", "bf16", "k{1,2,3,4,8}v{1,2,3,4,8}"} <= formats
    assert {"snapkv", "kv-compress", "gate"} <= selectors
    assert both == {"leankv"}
    assert {"zack", "palu"} <= bases
    assert readings == {"quest"}


def test_no_policy_is_left_out() -> None:
    text = said("policies")
    names = [name for name in Registry.scan().claims if not (name[0] == "k" and name[2:3] == "v")]
    assert all(f"{name} " in text for name in names)


def test_a_policy_without_a_facet_is_listed_apart(monkeypatch) -> None:
    class Idle(Part):
        """Does nothing."""

        name = "idle"

    scan = Registry.scan()
    monkeypatch.setattr(Registry, "load", lambda registry, name: Idle)
    monkeypatch.setattr(Registry, "scan", classmethod(lambda cls: scan))
    assert said("policies").startswith("Others")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            {"k1v2": ("1 bit and 2.", "x"), "k4v2": ("4 bits and 2.", "x")},
            {"k{1,4}v2": "{1,4} bits and 2."},
        ),
        ({"k1v2": ("1 and 2.", "x"), "k2v1": ("2 and 1.", "x")}, None),  # not all combinations
        ({"k1": ("1", "x"), "k2": ("2", "y")}, None),  # of two sources
        ({"h2o": ("Heavy hitters.", "x")}, None),
    ],
)
def test_names_are_joined_only_if_every_combination_is_there(lines, found) -> None:
    wanted = {name: what for name, (what, _) in lines.items()} if found is None else found
    assert {name: what for name, (what, _) in collapse(lines).items()} == wanted


def test_help_begins_with_the_server_and_the_demo() -> None:
    text = said("--help")
    at = [text.index(f" {name} ") for name in ORDER]
    assert at == sorted(at)
