"""The rotary embedding of a model is found when it is loaded, or a policy that needs it refused."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torch.nn import Module
from torch.nn.modules import module as torch_modules

from kv_policy import Rope, parse
from live_engine import ends
from transformed import by_transformers
from vllm_models import write_weights

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
POLICY, COUNT = "expected-attention:budget=24", 24
OPTIONS = {
    "kv_cache_memory_bytes": 1 << 20,
    "max_model_len": 256,
    "dtype": "float32",
    "skip_tokenizer_init": True,
}
HALVES = tuple((i, i + 16) for i in range(16))
NEIGHBOURS = tuple((2 * i, 2 * i + 1) for i in range(8))
SMOLLM3 = {"no_rope_layers": [1, 0], "pad_token_id": 0}
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[object, object]]] = {
    "neighbours in half of the dimensions": (
        "Glm4ForCausalLM",
        "glm4",
        {"partial_rotary_factor": 0.5, "pad_token_id": 0},
        (NEIGHBOURS, NEIGHBOURS),
    ),
    "one layer of two, in transformers' code": (
        "SmolLM3ForCausalLM",
        "smollm3",
        SMOLLM3,
        (HALVES, ()),
    ),
    "no layer": (
        "Cohere2ForCausalLM",
        "cohere2",
        {"sliding_window": 400, "layer_types": ["full_attention"] * 2, "pad_token_id": 0},
        ((), ()),
    ),
}


@pytest.mark.parametrize(("architecture", "kind", "more", "pairs"), MODELS.values(), ids=[*MODELS])
def test_tokens_are_those_of_transformers(
    start: Start,
    greedy: Greedy,
    prompts: list[list[int]],
    tmp_path: Path,
    architecture: str,
    kind: str,
    more: dict[str, Any],
    pairs: tuple[object, object],
) -> None:
    write_weights(tmp_path, architecture, kind, **more)
    # Before the engine starts, as vLLM changes the classes of transformers that it uses.
    wanted = by_transformers(str(tmp_path), POLICY, prompts, COUNT)
    with start(str(tmp_path), POLICY, poison=True, **OPTIONS) as engine:
        shape = ends(engine)[1].requests.empty.shape
        ropes = [shape.rope_of(layer) for layer in range(shape.layers)]
        assert tuple(rope.pairs for rope in ropes) == pairs
        assert isinstance(shape.rope, Rope) == (pairs[0] == pairs[1])
        assert greedy(engine, prompts, COUNT) == wanted
        assert not torch_modules._global_module_registration_hooks


def test_a_kind_that_grows_elsewhere_is_served_where_vllm_fixes_it(
    tiny: Callable[..., str], start: Start
) -> None:
    grows = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny(rope_parameters=grows)
    with start(model, POLICY, load_format="dummy", **OPTIONS) as engine:
        rope = ends(engine)[1].requests.empty.shape.rope
        assert rope.pairs == HALVES
        assert rope.frequencies == pytest.approx([10000 ** (-i / 16) for i in range(16)])


@pytest.mark.parametrize(
    ("architecture", "kind", "more", "reason"),
    [
        (
            "SmolLM3ForCausalLM",
            "smollm3",
            SMOLLM3 | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            r"this model \(dynamic\) changes with the length of the sequence",
        ),
        (
            "OPTForCausalLM",
            "opt",
            {"ffn_dim": 128, "word_embed_proj_dim": 128, "num_key_value_heads": 4},
            "layer 0 of this model changes them with their position in a way that",
        ),
    ],
    ids=["frequencies that grow", "learnt positions"],
)
def test_what_is_no_fixed_rotation_is_refused(
    tiny: Callable[..., str],
    start: Start,
    architecture: str,
    kind: str,
    more: dict[str, Any],
    reason: str,
) -> None:
    from kv_serve.vllm.config import UnservableError

    with (
        pytest.raises(UnservableError, match=reason),
        start(tiny(architecture, kind, **more), POLICY, load_format="dummy", **OPTIONS),
    ):
        pass


class Runs(Module):
    def forward(self, input_ids: object, positions: object) -> None: ...


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (None, "this model cannot be run to find its rotation"),
        (Module(), "this model cannot be run to find its rotation"),
        (Runs(), "this model counts positions in several dimensions"),
    ],
    ids=["not found", "other arguments", "images"],
)
def test_a_model_that_counts_or_runs_in_another_way(
    tiny: Callable[..., str], model: Module | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import EngineArgs
    from vllm.config import ModelConfig

    from kv_serve.vllm.config import UnservableError
    from kv_serve.vllm.rotation import find_ropes

    config = EngineArgs(model=tiny(), skip_tokenizer_init=True).create_engine_config()
    monkeypatch.setattr(ModelConfig, "uses_mrope", True)
    with pytest.raises(UnservableError, match=f"{reason}; use a policy"):
        find_ropes(config, parse(POLICY), model, [])
