"""Documents that were compressed by themselves follow each other in one cache."""

from pathlib import Path

import pytest
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from typer.testing import CliRunner

import tiny_model
from alone import sharp_model
from kv_transformers import CompressedCache
from kv_transformers.cache_argument import passing
from kv_transformers.cli.compress import compress
from kv_transformers.cli.generate import generate
from latent_models import drawn
from small_sizes import windowed

FIRST = torch.randint(3, 101, (2, 23), generator=torch.Generator().manual_seed(1))
SECOND = torch.randint(3, 101, (2, 14), generator=torch.Generator().manual_seed(2))
MORE = torch.randint(3, 101, (2, 6), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> PreTrainedModel:
    path = tmp_path_factory.mktemp("documents") / "model"
    sharp_model().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def saved(
    model: PreTrainedModel, path: Path, policy: str, ids: Tensor, *, chat: bool | None = None
) -> Path:
    cache = CompressedCache(model, policy, page_tokens=4, backend="torch")
    with torch.no_grad():
        model(ids, **passing(model, cache))
    cache.save(path, ids, chat=chat)
    return path


def both(model: PreTrainedModel, folder: Path, policy: str) -> list[Path]:
    each = {"a.kv": FIRST, "b.kv": SECOND}
    return [saved(model, folder / name, policy, ids) for name, ids in each.items()]


def in_order(model: PreTrainedModel, documents: list[Tensor]) -> DynamicCache:
    """Join transformers' own caches of the documents, each of which begins at position 0."""
    joint = DynamicCache()
    for ids in documents:
        cache = DynamicCache()
        model(ids, **passing(model, cache))
        for i, layer in enumerate(cache.layers):
            joint.update(layer.keys, layer.values, i)
    return joint


@pytest.mark.parametrize("times", [1, 2])
@torch.no_grad()
def test_a_question_attends_to_all_documents(model, tmp_path, times) -> None:
    paths = both(model, tmp_path, "raw") * times
    whole = torch.cat([FIRST, SECOND] * times, 1)
    cache = CompressedCache.load(model, paths, page_tokens=4, backend="torch", ids=whole)
    own = in_order(model, [FIRST, SECOND] * times)
    for i in range(3):
        fresh = MORE[:, 2 * i : 2 * i + 2]
        want = model(fresh, **passing(model, own)).logits
        got = model(fresh, **passing(model, cache)).logits
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "policy", ["k8v4", "keydiff:budget=50%+k8v4", "snapkv:budget=9,window=4", "hadamard+k4v4"]
)
@torch.no_grad()
def test_a_joint_cache_is_saved_and_continued_as_any_other(model, tmp_path, policy) -> None:
    paths = both(model, tmp_path, policy)
    cache = CompressedCache.load(model, paths, page_tokens=4, backend="torch")
    assert cache.document is not None
    assert torch.equal(cache.document.ids, torch.cat((FIRST, SECOND), 1))
    each = [CompressedCache.load(model, path).memory().tokens for path in paths]
    assert torch.equal(cache.memory().tokens, sum(each))
    cache.save(tmp_path / "both.kv", cache.document.ids)
    again = CompressedCache.load(model, tmp_path / "both.kv", page_tokens=4, backend="torch")
    given = torch.cat((FIRST, SECOND, MORE), 1)
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    asked = [
        model.generate(given, attention_mask=torch.ones_like(given), **options, **passing(model, c))
        for c in (cache, again)
    ]
    assert torch.equal(*asked)


def test_what_cannot_follow_is_refused(model, tmp_path) -> None:
    one, other = both(model, tmp_path, "k8v4")
    with pytest.raises(ValueError, match="no file was given"):
        CompressedCache.load(model, [])
    third = saved(model, tmp_path / "c.kv", "k4v4", FIRST)
    with pytest.raises(ValueError, match=r"under the policy k4v4, but .* under k8v4; compress doc"):
        CompressedCache.load(model, [one, third])
    chat = saved(model, tmp_path / "d.kv", "k8v4", SECOND, chat=True)
    with pytest.raises(ValueError, match="some of the documents were compressed as the begin"):
        CompressedCache.load(model, [one, chat])
    with pytest.raises(ValueError, match="sequence 0 differs at token 0"):
        CompressedCache.load(model, [one, other], ids=torch.cat((SECOND, FIRST), 1))
    few = saved(model, tmp_path / "e.kv", "k8v4", FIRST[:1])
    with pytest.raises(ValueError, match=r"documents of \[2, 1\] sequences"):
        CompressedCache.load(model, [one, few])
    windows = both(model, tmp_path, "k8v4:window=4")
    with pytest.raises(ValueError, match=r"cannot be used here: .* a raw window of 4 tokens"):
        CompressedCache.load(model, windows)


def test_layers_with_windows_of_their_own_are_refused(tmp_path) -> None:
    drawn(windowed()).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with pytest.raises(ValueError, match="cannot follow each other in this model: layers that"):
        CompressedCache.load(model, both(model, tmp_path, "k8v4"))


def test_documents_are_named_one_after_another_on_the_command_line(tmp_path) -> None:
    app = typer.Typer()
    app.command("compress")(compress)
    app.command("generate")(generate)
    folder = tiny_model.save(tmp_path / "model")
    files = []
    for name, text in (("a", "The harbour was quiet. "), ("b", "The market was loud. ")):
        (tmp_path / f"{name}.txt").write_text(text * 4)
        files += [tmp_path / f"{name}.kv"]
        given = [folder, tmp_path / f"{name}.txt", "-o", files[-1], "--policy", "raw"]
        found = CliRunner().invoke(app, ["compress", *map(str, given)])
        assert found.exit_code == 0, found.output
    named = [x for file in files for x in ("--document", str(file))]
    tail = ["generate", "--model", str(folder), "--max-new-tokens", "8"]
    got = CliRunner().invoke(app, [*tail, *named, "Where was it quiet?"])
    assert got.exit_code == 0, got.output
    assert got.stdout
    alone = CliRunner().invoke(app, [*tail, *named[:2], "Where was it quiet?"])
    assert got.stdout != alone.stdout
