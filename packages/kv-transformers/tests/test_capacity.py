"""Capacities by a configuration alone are those of caches and engines."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3NextConfig
from typer.testing import CliRunner

from kv_policy import parse
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.capacity import Capacity, ModelMemory
from kv_transformers.cli import capacity as command
from kv_transformers.models import ModelError
from kv_transformers.models.config import weightless_model

SMALL = {"vocab_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def saved(folder: Path, **more: object) -> str:
    LlamaConfig(**{**SMALL, **HEADS, "dtype": "bfloat16", **more}).save_pretrained(folder)
    return str(folder / "config.json")


def app():
    import typer

    made = typer.Typer()
    made.command()(command.capacity)
    return made


@pytest.mark.parametrize(
    "spec",
    ["raw", "k8v4", "leankv", "k4v4:window=16", "snapkv:keep=25%,window=8+k8v4", "streaming"],
)
@pytest.mark.parametrize("tokens", [97, 160])
@torch.no_grad()
def test_a_cache_holds_no_more_than_its_capacity_says(make, batch, spec, tokens) -> None:
    model = make()
    found = ModelMemory.of(model).under(parse(spec), tokens)
    cache = CompressedCache(model, spec)
    model(**batch((tokens,)), **passing(model, cache))
    report = cache.memory()
    held = report.pages_used * report.page_bytes
    assert held <= found.kept_bytes <= found.prompt_bytes == found.least_bytes
    if spec in ("raw", "k8v4"):  # all tokens in one format: exact
        assert held == found.kept_bytes


@torch.no_grad()
def test_bounds_of_pages_are_counted(make, batch) -> None:
    model, spec = make(), "quest:budget=50%+k8v4"
    found = ModelMemory.of(model).under(parse(spec), 160)
    cache = CompressedCache(model, spec)
    model(**batch((160,)), **passing(model, cache))
    model(torch.tensor([[5]]), **passing(model, cache))
    report, alone = cache.memory(), ModelMemory.of(model).under(parse("k8v4"), 160)
    rows = cache.runtime.shape.layers * cache.runtime.shape.kv_heads
    pages = alone.kept_bytes // report.page_bytes
    assert found.kept_bytes - alone.kept_bytes == pages * 4 * cache.runtime.shape.key_dim
    assert report.bound_bytes >= found.kept_bytes - alone.kept_bytes - rows * report.page_bytes


@given(
    context=st.integers(1, 5000),
    kept=st.integers(1, 10**7),
    more=st.integers(0, 10**7),
    other=st.integers(0, 10**6),
    room=st.integers(0, 10**10),
)
def test_requests_that_fit_do_fit_and_one_more_does_not(context, kept, more, other, room) -> None:
    each = Capacity(context, kept, kept + more, other)
    count = each.requests(room)

    def needed(n: int) -> int:
        return (n - 1) * each.request_bytes + each.least_bytes

    assert count == 0 or needed(count) <= room
    assert needed(count + 1) > room


def test_windows_and_states_are_told_apart_from_what_a_policy_stores(tmp_path) -> None:
    layers = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **{**SMALL, **HEADS, "num_hidden_layers": 4, "sliding_window": 32, "layer_types": layers},
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path / "windows")
    found = ModelMemory.of(weightless_model(str(tmp_path / "windows")))
    token = 2 * 2 * 64 * 2
    assert found.windows == ((32, token), (32, token))
    assert found.states == 0
    assert found.stock(100) == Capacity(100, 2 * 100 * token, 2 * 100 * token, 2 * 32 * token)
    linear = Qwen3NextConfig(
        **{**SMALL, **HEADS, "num_hidden_layers": 4},
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    linear.save_pretrained(tmp_path / "states")
    found = ModelMemory.of(weightless_model(str(tmp_path / "states")))
    assert (found.shape.layers, found.windows, found.states) == (1, (), 3)


def test_a_prompt_that_is_compressed_by_chunks_never_needs_its_uncompressed_bytes() -> None:
    memory = ModelMemory.of(weightless_model_of_llama())
    streaming = memory.under(parse("streaming:budget=64,chunks=true"), 4096)
    snapkv = memory.under(parse("snapkv:budget=64"), 4096)
    assert streaming.prompt_bytes < memory.stock(4096).kept_bytes / 8 < snapkv.prompt_bytes


def weightless_model_of_llama():
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS))


def test_no_weight_is_read_or_allocated(tmp_path) -> None:
    model = weightless_model(saved(tmp_path, num_hidden_layers=200, intermediate_size=1 << 16))
    assert {each.device.type for each in model.parameters()} == {"meta"}
    assert model.dtype == torch.bfloat16
    assert weightless_model(saved(tmp_path), "float16").dtype == torch.float16


@settings(max_examples=50)
@given(st.integers(1, 10**6), st.sampled_from(["", "B", "KB", "kib", "MiB", "gb", "GiB", "T"]))
def test_sizes_are_read_as_people_write_them(number, unit) -> None:
    prefix, base = unit.lower()[:1], 1024 if "i" in unit else 1000
    power = " kmgt".index(prefix) if prefix in "kmgt" and prefix else 0
    assert command.nbytes(f"{number}{unit}") == command.nbytes(f" {number} {unit} ")
    assert command.nbytes(f"{number}{unit}") == number * base**power


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1.GiB", "12 apples", "1e3"])
def test_what_is_no_size_is_refused(tmp_path, text) -> None:
    run = CliRunner().invoke(app(), [saved(tmp_path), "--memory", text])
    assert run.exit_code == 2
    assert "is not a size; give a number and a unit" in run.output


def test_the_command_lists_policies_beside_the_uncompressed_cache(tmp_path) -> None:
    given = [saved(tmp_path), "--memory", "64MiB", "--context", "4096"]
    run = CliRunner().invoke(app(), [*given, "--policy", "k8v4", "--policy", "streaming"])
    assert run.exit_code == 0, run.output
    lines = run.output.splitlines()
    assert "2 layers of full attention, 2 KV heads of 64, bfloat16" in lines[0]
    assert lines[1] == "64 MiB for keys and values, requests of 4,096 tokens"
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:6]}
    assert list(rows) == ["uncompressed", "k8v4", "streaming"]
    assert rows["uncompressed"] == ["1,024", "4", "MiB", "4", "MiB", "16", "65,536", "1.00"]
    assert rows["k8v4"][-1] == "2.46"


def test_models_and_policies_that_cannot_be_are_refused(tmp_path) -> None:
    def said(*given: str) -> str:
        run = CliRunner().invoke(app(), given)
        assert run.exit_code == 2, run.output
        return run.output

    assert "name an existing config.json" in said(str(tmp_path / "no.json"))
    assert "unknown policy" in said(saved(tmp_path), "--policy", "k9v9")
    odd = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    Gemma3TextConfig(**{**SMALL, **HEADS, **odd}).save_pretrained(tmp_path / "windows")
    assert "only layers of type sliding_attention" in said(str(tmp_path / "windows"))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no causal language model can be built"):
        weightless_model(str(tmp_path / "bad"))
