"""The tables of peers say who is who, and leave out what was not measured."""

from tools.tables.peers import SCORES, cell, everything, named, percent

ABOUT = {"task": "nll", "setting": "agnostic"}


def test_names() -> None:
    assert named("kvzip: kvzip:keep=0.25") == "kvpress `kvzip:keep=0.25`"
    assert named("ours: k8v4") == "`k8v4`"
    assert [percent(share) for share in (0.5, 0.125)] == ["50 %", "12.5 %"]
    assert cell("nll", "agnostic") == "nll"
    assert set(SCORES) == {"needle", "multikey", "nll", "agreement"}


def test_what_failed_or_was_not_asked_is_no_score() -> None:
    rows = [
        {"kind": "way", "environment": "ours", "way": "k8v4", "held": 0.5, "score": 0.1, **ABOUT},
        {"kind": "failed", "environment": "vllm", "way": "fp8", **ABOUT},
        {
            **{"kind": "way", "environment": "ours", "way": "k8v4", "held": 0.6, "score": 1.0},
            **{"task": "needle", "setting": "aware"},
        },
    ]
    *_, ours, theirs = everything(rows).splitlines()
    assert ours == "| ours | `k8v4` | 0.600 | 1.000 | 0.100 |"
    assert theirs == "| vLLM | `fp8` |  |  | failed |"
