"""`kv-serve inspect`: what it prints and writes, and what it refuses with a sentence."""

import re
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import kv_eval.extras as extras
from closed_pipe import run_unread
from inspected import HELD, inspection
from kv_eval.cli.inspect_shown import SHADES, shade, shaded, show
from kv_eval.inspection.record import Inspection
from kv_policy.installing import install_command
from kv_serve.cli import app
from result_files import tree
from tiny_model import save

PROMPT = "The harbour was quiet that morning, and the boats lay still."
STREAMING = ("--policy", "streaming:budget=12,sinks=2")
COLOURS = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": ""}


def run(*arguments: object, stdin: str | None = None, env: dict[str, str] | None = None) -> Result:
    words = ["inspect", *map(str, arguments)]
    return CliRunner().invoke(app, words, input=stdin, env=env)


def done(*arguments: object, **more: object) -> Result:
    result = run(*arguments, **more)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object, stdin: str | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stderr)
    return " ".join(plain.replace("│", " ").split())


def rows(output: str, head: str) -> list[list[str]]:
    """The rows of a table, by how its line of names begins, up to an empty line."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == [head])
    found = []
    for line in lines[start + 1 :]:
        if not line.strip():
            break
        found.append(line.split())
    return found


# what is printed


def test_in_a_pipe_there_is_a_table_of_tokens(folder: Path) -> None:
    result = done(*STREAMING, "--model", folder, PROMPT)
    first = result.stdout.splitlines()[0]
    assert first.startswith("streaming:budget=12,sinks=2 on ")
    assert first.endswith(": 60 tokens, 2 layers of 2 KV heads")
    assert "\x1b" not in result.stdout
    tokens = rows(result.stdout, "token")
    assert len(tokens) == 60
    assert tokens[0] == ["0", "'T'", "##########", "100.0%", "100.0%"]
    assert tokens[2] == ["2", "'e'", "----------", "0.0%", "0.0%"]
    assert tokens[59] == ["59", "'.'", "##########", "100.0%", "100.0%"]
    held = rows(result.stdout, "held")
    assert held[0] == ["raw", "12.0", "20.0%", f"{48 * 72:,}"]
    assert held[1] == ["not", "kept", "48.0", "80.0%"]
    assert held[6][:5] == ["held", "in", "all", "12.0", "20.0%"]
    assert held[7] == ["an", "uncompressed", "cache", "60.0", "100.0%", f"{4 * 60 * 64:,}"]
    ratio = int(held[6][5].replace(",", "")) / (4 * 60 * 64)
    assert f"\n{ratio:.3f} of the bytes of an uncompressed cache\n" in result.stdout
    assert rows(result.stdout, "layer") == [["0", "12", "12"], ["1", "12", "12"]]


def test_on_a_screen_the_text_is_shaded(folder: Path) -> None:
    result = done(*STREAMING, "--model", folder, PROMPT, env=COLOURS)
    assert "\x1b[" in result.stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    assert PROMPT in plain
    assert "kept by   no head    under a third " in plain
    assert "'T'" not in plain
    assert "held as" in plain


def test_one_place_may_be_shown_alone(folder: Path) -> None:
    command = ("--policy", "k8v4:window=16", "--model", folder, PROMPT)
    anywhere = rows(done(*command).stdout, "token")
    result = done(*command, "--place", "raw window")
    window = rows(result.stdout, "token")
    assert "held as raw window by" in result.stdout
    assert anywhere[43][-4:] == ["##########", "100.0%", "100.0%", "0.0%"]
    assert [row[-4:] for row in window[43:45]] == [
        ["----------", "0.0%", "100.0%", "0.0%"],
        ["##########", "100.0%", "0.0%", "100.0%"],
    ]
    screen = done(*command, "--place", "raw window", env=COLOURS).stdout
    assert "held as raw window by   no head " in re.sub(r"\x1b\[[0-9;]*m", "", screen)
    said = refused(*command, "--place", "attic")
    assert "k8v4:window=16 has no place 'attic'; its places: k8v4, raw window" in said


def test_no_colour_is_a_table_too(folder: Path) -> None:
    result = done(*STREAMING, "--model", folder, "Hi", env=COLOURS | {"NO_COLOR": "1"})
    assert "'H'" in result.stdout


def test_a_token_has_the_shade_of_its_share() -> None:
    assert [shade(share) for share in (0.0, 0.01, 0.3, 0.5, 0.7, 0.99, 1.0)] == [
        *(0, 1, 1, 2, 3, 3, 4)
    ]
    written = shaded(inspection())
    assert written.plain == "The harbour <b>↵\n↵\n<s>quiet"
    styles = [str(span.style) for span in written.spans]
    assert styles[0] == SHADES[3][1]  # 3 of 4 heads
    assert styles[1] == SHADES[2][1]  # 2 of 4
    assert styles[-1] == SHADES[4][1]
    alone = [str(span.style) for span in shaded(inspection(), 0).spans]
    assert (alone[0], alone[-1]) == (SHADES[3][1], SHADES[0][1])  # the last is in the window
    strange = shaded(inspection(texts=("a\x1b[2J", "b\t", "c", "d", "e", "f")))
    assert strange.plain == "a\N{REPLACEMENT CHARACTER}[2Jb\tcdef"


def test_many_heads_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    show(inspection())
    assert rows(capsys.readouterr().out, "layer") == [["0", "4", "5"], ["1", "6", "2"]]
    show(inspection(held=((*HELD[0], *HELD[1]) * 5,)))
    assert rows(capsys.readouterr().out, "layer") == [["0", "2", "4.2", "6"]]


def test_names_are_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show(inspection(texts=("[red]", *"bcdef"), names=("[b]k", "raw window"), policy="[i]"))
    said = capsys.readouterr().out
    for name in ("[red]", "[b]k", "[i] on tiny"):
        assert name in said
    assert Console().render_str("[red]").plain == ""  # or this test would say nothing


# what is written


def test_the_numbers_and_the_page_are_written(folder: Path, tmp_path: Path) -> None:
    numbers, html = tmp_path / "new" / "a.json", tmp_path / "a.html"
    result = done(*STREAMING, "--model", folder, PROMPT, "--json", numbers, "--html", html)
    assert result.stderr.count("Written to") == 2
    found = msgspec.json.decode(numbers.read_bytes(), type=Inspection)
    assert found.held[0][0] == "00" + "." * 48 + "0" * 10
    assert found.model == str(folder)
    page = tree(html.read_bytes())
    assert page.one("div", id="prompt").text == PROMPT
    again = done(*STREAMING, "--model", folder, PROMPT, "--html", html)
    assert tree(html.read_bytes()).text == page.text
    assert again.stdout == result.stdout


def test_a_prompt_comes_from_a_file_or_a_pipe_as_it_is(folder: Path, tmp_path: Path) -> None:
    file, numbers = tmp_path / "prompt.txt", tmp_path / "a.json"
    file.write_text(f" {PROMPT}\n")
    for source, stdin in ((file, None), ("-", f" {PROMPT}\n")):
        done(*STREAMING, "--model", folder, "--file", source, "--json", numbers, stdin=stdin)
        found = msgspec.json.decode(numbers.read_bytes(), type=Inspection)
        assert "".join(token.text for token in found.tokens) == f" {PROMPT}\n"


def test_a_chat_template_is_asked_for(folder: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "a.json"
    done(*STREAMING, "--model", folder, "--chat", PROMPT, "--json", numbers)
    found = msgspec.json.decode(numbers.read_bytes(), type=Inspection)
    whole = f"<user>{PROMPT}<end><assistant>"
    assert "".join(token.text for token in found.tokens) == whole
    assert len(found.tokens) == 63


# what is refused


@pytest.mark.parametrize("prompt", [[], [""], ["  \n"]])
def test_an_empty_prompt(prompt: list[str]) -> None:
    said = refused(*STREAMING, *prompt)
    assert "the prompt is empty; pass a text as PROMPT, or a file with --file" in said


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "nope"), "unknown policy 'nope'; installed policies:"),
        (("--policy", "full"), "`full` is transformers' own cache: every head keeps every token"),
        (("--policy", "snapkv:budget=16"), "smaller than the 32 it protects"),
        ((*STREAMING, "--file", "missing.txt"), "PROMPT and --file missing.txt are both given"),
        ((*STREAMING, "--json", "."), "--json . is a folder; name a file"),
        ((*STREAMING, "--html", "."), "--html . is a folder; name a file"),
        ((*STREAMING, "--json", "a", "--html", "./a"), "--html and --json both name a;"),
        ((*STREAMING, "--backend", "abacus"), "abacus"),
        ((*STREAMING, "--model", "./nothing-here"), "unknown model './nothing-here'"),
        ((), "Missing option '--policy'"),
    ],
)
def test_what_cannot_be_is_refused(
    options: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in refused(*options, PROMPT)
    assert not [*tmp_path.iterdir()]


def test_a_page_without_what_draws_its_map(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    said = refused(*STREAMING, "--html", tmp_path / "a.html", PROMPT)
    assert "--html needs Altair with vl-convert, which draw charts: `" in said
    assert install_command("altair[save]>=6") in said


def test_a_file_that_cannot_be_read_or_is_also_an_output(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    assert "prompt.txt cannot be read" in refused(*STREAMING, "--file", file)
    file.write_bytes("é".encode("latin-1"))
    assert "is not UTF-8 text" in refused(*STREAMING, "--file", file)
    file.write_text(PROMPT)
    said = refused(*STREAMING, "--file", file, "--json", file)
    assert "which is the prompt to read; use another file" in said
    assert file.read_text() == PROMPT


def test_a_prompt_longer_than_the_model_reads(folder: Path) -> None:
    said = refused(*STREAMING, "--model", folder, "a" * 1025)
    assert "the prompt has 1,025 tokens and the model" in said
    assert "reads 1,024; use a shorter one" in said
    done(*STREAMING, "--model", folder, "a" * 1024)


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", chat=False)
    said = refused(*STREAMING, "--model", plain, "--chat", PROMPT)
    assert "has no chat template; read the text as it is, without --chat" in said


def test_the_page_is_written_where_nobody_reads_what_is_printed(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, numbers = tmp_path / "x.html", tmp_path / "x.json"
    written = ("--html", page, "--json", numbers)
    assert run_unread(monkeypatch, "inspect", *STREAMING, "--model", folder, PROMPT, *written) == 1
    assert page.read_bytes().startswith(b"<!doctype html>")
    assert numbers.is_file()
    said = " ".join(capsys.readouterr().err.split())
    assert f"Written to {numbers}." in said
    assert "Traceback" not in said
    assert "Broken" not in said
