"""Code in a model's folder never runs, whatever a user answers to prompts."""

import ast
import json
import shutil
from pathlib import Path

import pytest

from kv_transformers.models import load_model
from model_files import refusal

ROOT = Path(__file__).parents[4]


@pytest.fixture
def answers_yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answer y to every prompt, and record the prompts."""
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    return asked


def with_code(folder: Path, into: Path, config: str, entry: dict[str, object]) -> Path:
    """Create a model's folder whose config names code that writes a file when it runs."""
    made = Path(shutil.copytree(folder, into / "model"))
    (made / "theirs.py").write_text(f"open({str(into / 'ran')!r}, 'w').close()\n")
    settings = json.loads((made / config).read_text())
    (made / config).write_text(json.dumps(settings | entry))
    return made


CODE = {
    "a model": (
        "config.json",
        {
            "model_type": "theirs",
            "auto_map": {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M"},
        },
    ),
    "a tokenizer": (
        "tokenizer_config.json",
        {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": [None, "theirs.T"]}},
    ),
}


@pytest.mark.parametrize("kind", CODE)
def test_a_model_that_needs_code_of_its_folder_is_refused(
    kind: str, tiny_folder: Path, tmp_path: Path, answers_yes: list[str]
) -> None:
    folder = with_code(tiny_folder, tmp_path, *CODE[kind])
    message = refusal(str(folder))
    assert not answers_yes
    assert not (tmp_path / "ran").exists()
    assert "can only be loaded by code in its folder, which kv-serve never runs" in message


def test_a_model_that_brings_code_and_does_not_need_it_is_loaded_without(
    tiny_folder: Path, tmp_path: Path, answers_yes: list[str]
) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "theirs.M"}}
    folder = with_code(tiny_folder, tmp_path, "config.json", code)
    assert load_model(str(folder), device="cpu").model.config.model_type == "llama"
    assert not answers_yes
    assert not (tmp_path / "ran").exists()


def test_every_call_that_loads_says_no() -> None:
    found = 0
    for tree in ("packages", "benchmarks", "tools"):
        for path in sorted((ROOT / tree).rglob("*.py")):
            if "tests" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if node.func.attr != "from_pretrained":
                    continue
                said = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert said.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
                found += 1
    assert found >= 4
