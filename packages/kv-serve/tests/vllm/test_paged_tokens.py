"""The same tokens as transformers gives under the same policy, and what vLLM says it can hold."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kv_policy import Calibrated
from kv_serve.models.folder import fingerprint
from kv_svd import Calibration

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
MEMORY, LONGEST, COUNT = 1 << 20, 256, 24
COMPRESS = "kv-compress:rate=4,floor=16"
POLICIES = (
    f"{COMPRESS}+k8v4",
    "snapkv:budget=24,window=8+k8v4",
    "leankv",
    "k4v4:keys=channel,block=16,window=16",
    "zack:file={},rate=0.4",
    "zack:file={},rate=0.4+" + COMPRESS + "+k8v4",
)


@dataclass(frozen=True)
class Model:
    """A small model with weights that both load, and statistics to fit a basis by."""

    folder: str
    statistics: str

    def policy(self, text: str) -> str:
        return text.format(self.statistics)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (150, 129, 40)]


@pytest.fixture(scope="session")
def model(tiny: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Model:
    from transformers import AutoModelForCausalLM, LlamaConfig

    from kv_serve.hf.support import cache_shape

    folder = tiny(initializer_range=0.1, torch_dtype="float32")
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    made.save_pretrained(folder)
    shape = cache_shape(made)
    found = Calibration(shape, torch.stack([x.self_attn.o_proj.weight for x in made.model.layers]))
    for layer in range(shape.layers):
        sizes = (1, shape.kv_heads, shape.group, 300), (1, shape.kv_heads, 300)
        query, key, value = (torch.randn(*sizes[i > 0], shape.key_dim) for i in range(3))
        found.see(layer, query, key, value)
    path = tmp_path_factory.mktemp("zack") / "statistics"
    facts = Calibrated(
        model="tiny", fingerprint=fingerprint(Path(folder)), text="noise", digest="0"
    )
    found.write(path, facts)
    return Model(folder, str(path))


def by_transformers(model: Model, policy: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    from kv_serve import CompressedCache

    made = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    found = []
    for prompt in prompts:
        cache = CompressedCache(made, policy)
        ids = torch.tensor([prompt])
        out = made.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            min_new_tokens=COUNT,
            max_new_tokens=COUNT,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def expected_capacity(policy_text: str, blocks: int) -> int:
    """Tokens that vLLM states: requests of the longest length whose kept pages blocks pay for."""
    from kv_policy import CacheShape, parse
    from kv_serve.vllm.account import kept_tokens
    from paged_engine import account_of

    shape = CacheShape(2, 2, 2, 32, 32, torch.float32)
    policy = parse(policy_text)
    account = account_of(policy, shape)
    kept = kept_tokens(policy, LONGEST, account.token_bytes)
    each = account.blocks(account.pages(kept))
    return blocks * LONGEST // each


@pytest.fixture(scope="module", params=POLICIES)
def served(
    request: pytest.FixtureRequest, start: Start, model: Model
) -> Iterator[tuple["LLM", str]]:
    policy = model.policy(request.param)
    options = {
        "kv_cache_memory_bytes": MEMORY,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": 512,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "poison": True,
    }
    with start(model.folder, policy, **options) as running:
        yield running, policy


def test_tokens_are_those_of_transformers(
    served: tuple["LLM", str], model: Model, prompts: list[list[int]], greedy: Greedy
) -> None:
    engine, policy = served
    wanted = by_transformers(model, policy, prompts)
    assert [greedy(engine, [prompt], COUNT)[0] for prompt in prompts] == wanted
    assert greedy(engine, prompts, COUNT) == wanted  # together, and with prefixes seen before


def test_capacity_is_what_the_pages_of_the_longest_request_make_it(
    served: tuple["LLM", str],
) -> None:
    engine, policy = served
    cache = engine.llm_engine.vllm_config.cache_config
    assert cache.kv_cache_size_tokens == expected_capacity(policy, cache.num_gpu_blocks)
