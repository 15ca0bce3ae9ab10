"""`kv-serve eval --host vllm`: a real model's answers and nats from engines, policy by policy."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from forked import forked
from kv_serve.cli import app

pytestmark = pytest.mark.model


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def said(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).replace("│", " ").split())


@pytest.mark.parametrize(
    "given", ["kv-compress:rate=4+k8v4", pytest.param("k8v4", marks=pytest.mark.slow)]
)
def test_answers_and_nats_come_from_engines(tmp_path: Path, given: str) -> None:
    file = tmp_path / "found.json"
    tasks = [f"--task={name}" for name in ("needle", "nll", "agreement")]
    sized = ("--length=700", "--samples=1", "--continuation=24", "--seed=1", f"--json={file}")
    with forked("kv_eval.vllm.asking"):
        result = run(*tasks, *sized, "--host=vllm", f"--policy={given}")
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert found["settings"]["host"] == "vllm"
    assert "attention" not in found
    rows = {(row["task"], row["policy"]): row for row in found["rows"]}
    assert {row["setting"] for row in found["rows"] if row["task"] == "needle"} == {"aware"}
    assert {policy for _, policy in rows} == {"full", given}
    for (task, policy), row in rows.items():
        kept = row["kv_bytes"] / row["full_bytes"]
        if policy == "full":
            # 700 tokens of 23,040 bytes, in blocks of 128 tokens
            assert row["kv_bytes"] == pytest.approx(6 * 128 * 23_040, rel=0.01)
        elif "rate=4" in policy:
            assert kept < 0.25
        else:
            assert 0.35 < kept < 0.55
        if task == "needle":
            assert row["score"] == 1
        elif task == "nll":
            assert row["score"] - row["full_score"] < 0.5
    assert rows["agreement", "full"]["score"] == 1
    assert not file.with_name(file.name + ".partial").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--backend=torch",), "--backend and --device are for transformers"),
        (("--setting=agnostic",), "needle needs its question inside the prompt"),
    ],
)
def test_what_vllm_cannot_do_is_refused(
    tmp_path: Path, options: tuple[str, ...], sentence: str
) -> None:
    given = ("--task=needle", "--host=vllm", f"--json={tmp_path / 'x.json'}", "--policy=k8v4")
    result = run(*given, *options)
    assert result.exit_code == 2
    assert sentence in said(result)
