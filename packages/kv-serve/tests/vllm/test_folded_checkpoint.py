"""A folded checkpoint in vLLM: the model's tokens, the policy's, and refusals of other bases."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from transformed import by_transformers
from vllm_models import write_weights

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
COUNT = 24
POLICIES = ("rate=0.4", "rate=0.4,ranks=uniform", "rate=0.4+kv-compress:rate=4,floor=16+k8v4")
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def checkpoint(weights: str, statistics: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    from kv_policy import parse
    from kv_transformers.checkpoint import write_folded

    out = tmp_path_factory.mktemp("folded") / "out"
    write_folded(weights, parse(f"zack:file={statistics},rate=0.4"), out)
    return str(out)


@pytest.mark.parametrize("policy", [None, "raw", "k8v4"])
def test_without_a_basis_its_tokens_are_those_of_the_model(
    start: Start,
    greedy: Greedy,
    weights: str,
    checkpoint: str,
    prompts: list[list[int]],
    policy: str | None,
) -> None:
    wanted = by_transformers(checkpoint if policy else weights, policy, prompts, COUNT)
    with start(checkpoint, policy, **OPTIONS) as engine:
        assert greedy(engine, prompts, COUNT) == wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_under_the_policy_its_tokens_are_those_of_the_model(
    start: Start,
    greedy: Greedy,
    weights: str,
    statistics: str,
    checkpoint: str,
    prompts: list[list[int]],
    policy: str,
) -> None:
    spec = f"zack:file={statistics},{policy}"
    wanted = by_transformers(weights, spec, prompts, COUNT)
    assert by_transformers(checkpoint, spec, prompts, COUNT) == wanted
    tokens = []
    for model in (weights, checkpoint):
        with start(model, spec, poison=True, **OPTIONS) as engine:
            assert greedy(engine, prompts, COUNT) == wanted
            tokens.append(engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)
    assert tokens[0] == tokens[1]


def test_values_are_not_mapped(
    start: Start, greedy: Greedy, statistics: str, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only maps of keys multiply: each is applied to vectors of a key's 32 dimensions."""
    from kv_policy import HeadBasis

    with start(checkpoint, f"zack:file={statistics},rate=0.4", **OPTIONS) as engine:

        def undo(self: HeadBasis, out: object) -> None:
            raise AssertionError("an output is mapped back")

        monkeypatch.setattr(HeadBasis, "undo", undo)
        assert len(greedy(engine, [[3, 4, 5, 6]], 4)[0]) == 4


def test_other_bases_are_refused(
    start: Start, weights: str, statistics: str, checkpoint: str, tmp_path: Path
) -> None:
    from noise_statistics import write_statistics

    other = write_statistics(Path(weights), tmp_path / "other", seed=1)
    (tmp_path / "model").mkdir()
    write_weights(tmp_path / "model")
    config = Path(checkpoint, "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config)
    for model, policy, sentence in (
        (checkpoint, "hadamard+k8v4", "maps values, but this model's weights hold"),
        (checkpoint, f"zack:file={other},rate=0.4", "hold the value basis"),
        (checkpoint, f"kq-svd:file={statistics},rate=0.4", "maps values, but this model's"),
        (tmp_path / "model", f"zack:file={statistics},rate=0.4", "are not those that were written"),
    ):
        with pytest.raises(ValueError, match=sentence), start(str(model), policy, **OPTIONS):
            pass
