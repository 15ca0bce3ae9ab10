"""Adapters beside a policy: what is compressed are the keys and values that they change."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from transformed import by_transformers
from vllm_models import write_adapter

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
COUNT = 12
PAGES = "kv-compress:budget=24,window=8+k8v4"


@pytest.mark.parametrize("policy", ["k8v4", pytest.param(PAGES, marks=pytest.mark.slow)])
def test_two_adapters_are_served_at_once(
    start: Start, weights: str, tmp_path: Path, prompts: list[list[int]], policy: str
) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    both = [tmp_path / name for name in ("one", "other")]
    for seed, folder in enumerate(both):
        write_adapter(Path(weights), folder, seed)
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    options |= {"kv_cache_memory_bytes": 1 << 21, "max_model_len": 256, "dtype": "float32"}
    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with start(weights, policy, skip_tokenizer_init=True, **options) as engine:
        found = engine.generate(
            [{"prompt_token_ids": prompts[2]}] * 2,
            settings,
            use_tqdm=False,
            lora_request=[LoRARequest(x.name, i + 1, str(x)) for i, x in enumerate(both)],
        )
    expected = [by_transformers(str(x / "merged"), policy, prompts[2:], COUNT)[0] for x in both]
    assert [list(each.outputs[0].token_ids) for each in found] == expected
    assert expected[0] != expected[1]
