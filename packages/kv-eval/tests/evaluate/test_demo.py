"""The demo: on a tiny model for its form, on the real one for what it shows."""

import json
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kv_eval.demo as demo
from kv_eval.tasks import Text
from kv_policy import parse
from kv_policy.installing import install_command
from kv_runtime import Serving
from kv_serve.cli import app
from kv_transformers.from_text import make_cache
from kv_transformers.models import LoadedModel


def test_the_policy_of_the_readme_is_shown() -> None:
    shown = (
        *("full", "k8v4", "k4v2", "streaming:budget=1100"),
        "kv-compress:keep=25%+k8v4",
    )
    assert demo.caches(2200, "another model") == shown
    fitted_to = parse(demo.GATED).fitted_to
    assert fitted_to is not None
    assert demo.caches(2200, fitted_to) == (*shown, demo.GATED)


def test_each_cache_has_an_outcome(loaded: LoadedModel, text: Text, tmp_path: Path) -> None:
    show = demo.Show(loaded, text, 400)
    outcomes = tuple(show.run(("full", "raw", "streaming:budget=200")))
    full, raw, streaming = outcomes
    assert (raw.needle, raw.chat) == (full.needle, full.chat)
    assert full.kv_bytes == full.full_bytes == raw.full_bytes
    assert full.ratio == 1.0
    assert streaming.ratio < 0.7
    assert all(o.token_ms > 0 for o in outcomes)
    show.report(outcomes, "cpu avx2").write(tmp_path / "demo.json")
    written = json.loads((tmp_path / "demo.json").read_text())
    assert list(written) == [
        *("model", "prompt_tokens", "needle", "depth", "attention", "outcomes"),
    ]
    assert written["attention"] == "cpu avx2"
    assert written["outcomes"][1]["policy"] == "raw"
    assert written["needle"] == show.sample.answers[0]


def test_a_chat_goes_on_in_the_same_cache(loaded: LoadedModel) -> None:
    made = []

    def make(model: object, spec: str) -> object:
        made.append(make_cache(model, spec))
        return made[-1]

    demo.chat(loaded, make, "raw", new_tokens=6)
    (cache,) = made
    # <user>, turn, <end>, <assistant>, at most 6 tokens of reply, <end>; then the same again
    tokens = sum(len(turn) + 4 for turn in demo.TURNS)
    assert tokens - 2 <= cache.get_seq_length() <= tokens + 12


def test_a_template_that_rewrites_turns_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for message in messages %}{{ loop.revindex }}{{ message['content'] }}{% endfor %}"
    )
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="rewrites earlier turns"):
        demo.chat(loaded, make_cache, "full", new_tokens=4)


def test_the_command_prints_a_table_and_writes_it(
    loaded: LoadedModel, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = import_module("kv_eval.cli.demo")  # the package has a function of that name
    monkeypatch.setattr(command, "load_model", lambda name: loaded)
    monkeypatch.setattr("kv_eval.tasks.default_text", lambda: text)
    monkeypatch.setattr(demo, "QUICK_LENGTH", 300)
    path = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "is hidden in a text of" in result.stdout
    for spec in demo.caches(300, loaded.fingerprint):
        assert f"\n{spec} " in result.stdout
    shown, _, commands = result.stdout.partition("\nNext:\n")
    shown, _, _ = shown.partition("\nTo do: ")  # a line of its own, to be copied
    assert max(map(len, shown.splitlines())) <= 100
    assert len(commands.splitlines()) == 3
    assert len(json.loads(path.read_text())["outcomes"]) == 5
    result = CliRunner().invoke(app, ["demo", "--json", str(tmp_path)])
    assert result.exit_code == 2
    assert "is a folder" in " ".join(result.stderr.split())


def test_times_are_shown_for_native_code_alone(
    loaded: LoadedModel, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = import_module("kv_eval.cli.demo")
    native = Serving("cpu", "avx2")
    monkeypatch.setattr(command, "load_model", lambda name: loaded)
    monkeypatch.setattr("kv_eval.tasks.default_text", lambda: text)
    monkeypatch.setattr(demo, "QUICK_LENGTH", 300)
    monkeypatch.setattr(demo, "caches", lambda *_: ("raw",))
    backends = import_module("kv_runtime.backends").all_backends()
    absent = replace(backends["cpu"], installed=False)
    monkeypatch.setattr("kv_runtime.backends.all_backends", lambda: {"cpu": absent})
    for served, shown in ((native, True), (Serving("torch"), False)):
        make = partial(make_cache, backend="torch")
        monkeypatch.setattr(command, "caches_by", lambda *_, now=(make, served): now)
        result = CliRunner().invoke(app, ["demo", "--quick"])
        assert result.exit_code == 0, result.output
        said = " ".join(result.stdout.split())
        assert ("ms/token" in said) == ("attend by cpu avx2" in said) == shown
        assert ("Times are omitted" in said) != shown
        assert (f"To do: `{install_command('kv-cpu')}`" in said) != shown


def test_the_program_is_named_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = import_module("kv_eval.cli.demo")
    program = tmp_path / "kv-serve"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for typed, named in (
        (str(program), "kv-serve"),  # a shell finds it and gives its whole path
        (".nox/demo/bin/kv-serve", ".nox/demo/bin/kv-serve"),
        ("/elsewhere/kv-serve", "/elsewhere/kv-serve"),
    ):
        monkeypatch.setattr("sys.argv", [typed])
        assert command._program() == named


def test_next_commands_fit_a_line_behind_nox() -> None:
    commands = import_module("kv_eval.cli.demo").next_commands(".nox/demo/bin/kv-serve")
    assert max(map(len, commands)) <= 98


@pytest.mark.model
def test_the_real_model_finds_the_number_in_half_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "caches", lambda *_: ("full", "k8v4"))
    monkeypatch.setattr(demo, "TIMED", 1)
    path = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    outcomes = {o["policy"]: o for o in json.loads(path.read_text())["outcomes"]}
    full, k8v4 = outcomes["full"], outcomes["k8v4"]
    assert full["needle_right"]
    assert full["chat_right"]
    assert k8v4["needle_right"]
    assert k8v4["chat_right"]
    assert 104 / 256 <= k8v4["ratio"] <= 104 / 256 + 0.04
