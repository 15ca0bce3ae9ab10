"""The vLLM examples of the documentation work: the script is run, the options are parsed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.pages import ROOT, blocks, commands, pages

TUTORIAL = ROOT / "docs" / "tutorials" / "serve.md"
CALLED = [
    (page, line, words[1:])
    for page in pages()
    for line, words in commands((ROOT / page).read_text())
    if words[:1] == ["serve"]
]


@pytest.mark.parametrize(("page", "line", "words"), CALLED, ids=lambda value: str(value))
def test_every_option_of_a_server_is_one_that_vllm_reads(
    page: str, line: int, words: list[str]
) -> None:
    from kv_serve.vllm.server import read

    if any(word.startswith("--help") for word in words):
        with pytest.raises(SystemExit) as left:
            read(words)
        assert left.value.code in (0, None)
        return
    given = list(words)
    for ours in {"--policy", "--documents"} & {*given}:
        at = given.index(ours)
        del given[at : at + 2]
    given = [each for each in given if each != "--kv-turns"]
    assert read(given).model_tag == given[0]


@pytest.mark.model
def test_the_script_of_the_tutorial_answers(tmp_path: Path) -> None:
    (script,) = (b.text for b in blocks(TUTORIAL.read_text()) if "LLM(" in b.text)
    (tmp_path / "answer.py").write_text(script)
    # The engine is in the script's process; that of a server is in one of its own.
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    done = subprocess.run(
        [sys.executable, "answer.py"],
        env=kept | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "kv-serve stores keys and values as kv-compress:rate=4+k8v4" in said
