"""A chat reads each turn once, and answers as without a cache."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

import kv_transformers.cli.chat as command
from kv_transformers.conversation import Conversation
from kv_transformers.from_text import caches_of
from kv_transformers.models import LoadedModel, load_model
from tiny_model import save

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


def talking(loaded: LoadedModel, spec: str) -> Conversation:
    return Conversation(loaded, partial(caches_of(loaded), loaded.model, spec))


def alone(loaded: LoadedModel, turns: list[str]) -> list[str]:
    """Answer as a model without a cache does, from the whole text."""
    messages, found = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = loaded.tokenizer.encode(text, add_special_tokens=False)
        given = torch.tensor([ids])
        out = loaded.model.generate(
            given, attention_mask=torch.ones_like(given), use_cache=False, **GREEDY
        )
        found.append(loaded.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": found[-1]})
    return found


@pytest.fixture
def read(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Tokens of each forward pass."""
    counts: list[int] = []
    hook = loaded.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield counts
    hook.remove()


@pytest.mark.parametrize("spec", ["full", "raw"])
def test_each_turn_is_read_once_and_answers_are_those_of_the_whole_text(loaded, read, spec) -> None:
    turns = ["Hello there.", "And now?", "A third, longer question."]
    wanted = alone(loaded, turns)
    read.clear()
    talk = talking(loaded, spec)
    answers, begun = [], []
    for turn in turns:
        begun.append(len(read))
        answers.append(talk.answer(turn, GREEDY))
    assert answers == wanted
    # The last token of an answer is read with the next turn.
    assert sum(read) == len(talk.ids) - 1
    assert read[begun[2]] < len(talk.ids) / 2


def test_turns_are_read_again_under_another_policy(loaded, read) -> None:
    talk = talking(loaded, "raw")
    first = talk.answer("Hello there.", GREEDY)
    before = len(read)
    talk.renew(partial(caches_of(loaded), loaded.model, "k8v8"))
    talk.answer("And now?", GREEDY)
    assert talk.turns[1]["content"] == first
    assert read[before] > len("Hello there.") + len("And now?")
    assert "k8v8" in repr(talk.cache)


def test_a_template_that_changes_earlier_turns_reads_all_again(loaded, read) -> None:
    tokenizer = loaded.tokenizer
    template = tokenizer.chat_template
    try:
        tokenizer.chat_template = "{{ messages | length }}" + template
        talk = talking(loaded, "raw")
        talk.answer("Hello there.", GREEDY)
        first = talk.cache
        before = len(read)
        talk.answer("And now?", GREEDY)
        assert talk.cache is not first
        assert read[before] > len("Hello there.") + len("And now?")
    finally:
        tokenizer.chat_template = template


def test_a_refused_turn_leaves_the_conversation_as_it_was(loaded) -> None:
    talk = talking(loaded, "raw")
    talk.answer("Hello there.", GREEDY)
    turns = list(talk.turns)
    with pytest.raises(ValueError, match="no_such"):
        talk.answer("And now?", {**GREEDY, "no_such": 1})
    assert talk.turns == turns
    assert talk.answer("And now?", GREEDY) == alone(loaded, ["Hello there.", "And now?"])[1]


# the command


@pytest.fixture
def run(folder: Path) -> Callable[..., Result]:
    app = typer.Typer()
    app.command()(command.chat)

    def called(lines: str, *options: str) -> Result:
        given = ["--model", str(folder), "--device", "cpu", "--max-new-tokens", "8", *options]
        return CliRunner().invoke(app, given, input=lines)

    return called


def test_lines_are_answered_and_commands_obeyed(run, loaded) -> None:
    wanted = alone(loaded, ["Hello there.", "And now?"])
    lines = "Hello there.\n\n/memory\n/policy raw\nAnd now?\n/reset\n/memory\n/what\n/exit\nno\n"
    found = run(lines, "--policy", "raw")
    assert found.exit_code == 0, found.output
    assert [line for line in found.stdout.splitlines() if line in wanted] == wanted
    assert "uncompressed" in found.stdout
    assert "no tokens yet" in found.stdout
    assert "unknown command '/what'" in found.stderr
    assert "/policy SPEC" in found.stdout


def test_a_policy_that_cannot_be_is_refused_and_the_chat_goes_on(run) -> None:
    found = run("/policy k9v9\nHello there.\n", "--policy", "raw")
    assert found.exit_code == 0
    assert "unknown policy 'k9v9'" in found.stderr
    assert run("", "--policy", "k9v9").exit_code == 2


def test_a_message_that_is_too_long_is_not_read(run) -> None:
    found = run("a" * 2000 + "\n/memory\n", "--policy", "raw")
    assert "the model supports 1,024 in total" in " ".join(found.stderr.split())
    assert "no tokens yet" in found.stdout


def test_interrupting_an_answer_ends_it_on_a_whole_token(loaded) -> None:
    talk = talking(loaded, "raw")

    class Interrupting:
        def __init__(self) -> None:
            self.count = 0

        def put(self, value: torch.Tensor) -> None:
            self.count += 1
            if self.count == 4:  # the prompt, and three tokens
                signal.raise_signal(signal.SIGINT)

        def end(self) -> None:
            pass

    before = signal.getsignal(signal.SIGINT)  # ignored where a shell runs tests in the background
    with command._stopping() as stop:
        options = {**GREEDY, "streamer": Interrupting(), "stopping_criteria": [stop]}
        talk.answer("Hello there.", options)
    prompt = len(talking(loaded, "raw").next_ids("Hello there."))
    assert 3 <= len(talk.ids) - prompt < GREEDY["max_new_tokens"]
    assert talk.answer("And now?", GREEDY)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_model_without_a_template_is_refused(tmp_path) -> None:
    plain = save(tmp_path / "plain", chat=False)
    app = typer.Typer()
    app.command()(command.chat)
    found = CliRunner().invoke(app, ["--model", str(plain), "--device", "cpu"])
    assert found.exit_code == 2
    assert "has no chat template" in found.stderr
