"""What the list of vLLM's features says of a way to store tokens is so, in one engine of each."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kv_serve.features import FEATURES, Feature
from vllm_models import write_experts, write_tokenizer, write_vision, write_weights

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.config import VllmConfig

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
POLICIES = {"slots": "k8v4", "pages": "kv-compress:budget=24,window=8+k8v4"}
COUNT, TOGETHER = 12, 2
EXAMPLE: dict[str, Any] = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model, and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("served")
    write_weights(folder)
    write_tokenizer(folder)
    return folder


@dataclass(frozen=True)
class Served:
    """An engine under a policy, and the tokens that it generates for some prompts."""

    kind: str
    engine: "LLM"
    model: Path
    prompts: list[list[int]]
    tokens: list[list[int]]  # as they are with cached prefixes, where these are shared

    @property
    def asked(self) -> list[dict[str, list[int]]]:
        return [{"prompt_token_ids": prompt} for prompt in self.prompts]

    def answers(self, **settings: Any) -> list[Any]:
        from vllm import SamplingParams

        given = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True} | settings
        return self.engine.generate(self.asked, SamplingParams(**given), use_tqdm=False)

    def add(self, name: str, prompt: int, count: int = COUNT, priority: int = 0) -> None:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        self.engine.llm_engine.add_request(name, self.asked[prompt], settings, priority=priority)

    def finish(self) -> dict[str, list[int]]:
        """Step until all is answered; give the tokens in the order in which requests end."""
        found = {}
        while self.engine.llm_engine.has_unfinished_requests():
            for each in self.engine.llm_engine.step():
                if each.finished:
                    found[each.request_id] = list(each.outputs[0].token_ids)
        return found

    def all_free(self) -> bool:
        scheduler = self.engine.llm_engine.engine_core.engine_core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return bool(pool.get_num_free_blocks() == pool.num_gpu_blocks - 1)


@pytest.fixture(scope="module", params=POLICIES)
def served(
    request: pytest.FixtureRequest,
    start: Start,
    greedy: Greedy,
    model: Path,
    prompts: list[list[int]],
) -> Iterator[Served]:
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": 1 << 21,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,  # where prompts are cut would change their answers
        "max_num_seqs": TOGETHER,
        "block_size": 16,
        "dtype": "float32",
        "scheduling_policy": "priority",
        # A random model would write spaces without end where a grammar allows them.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    with start(str(model), POLICIES[request.param], **options) as engine:
        greedy(engine, prompts, COUNT)
        yield Served(request.param, engine, model, prompts, greedy(engine, prompts, COUNT))


def prefixes(served: Served) -> None:
    cached = [each.num_cached_tokens for each in served.answers()]
    assert all(cached) if served.kind == "slots" else not any(cached)


def several(served: Served) -> None:
    found = served.answers(n=3, temperature=1, top_k=1)
    for each, tokens in zip(found, served.tokens, strict=True):
        assert [list(one.token_ids) for one in each.outputs] == [tokens] * 3


def probabilities(served: Served) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(str(served.model), dtype=torch.float32)
    found = served.answers(logprobs=2, prompt_logprobs=1)
    for each, prompt in zip(found, served.prompts, strict=True):
        (one,) = each.outputs
        assert [max(x, key=lambda i, x=x: x[i].logprob) for x in one.logprobs] == [*one.token_ids]
        with torch.no_grad():
            expected = made(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for at, told in enumerate(each.prompt_logprobs[1:]):
            token = prompt[at + 1]
            assert told[token].logprob == pytest.approx(float(expected[at, token]), abs=1e-3)


def structured(served: Served) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    asked = (
        StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{4}"),
        StructuredOutputsParams(json=schema),
    )
    for given in asked:
        for each in served.answers(structured_outputs=given, max_tokens=60, ignore_eos=False):
            # vLLM's own text begins with bytes of the prompt, which is no valid text.
            text = served.engine.get_tokenizer().decode(
                each.outputs[0].token_ids, skip_special_tokens=True
            )
            if given.regex is None:
                assert json.loads(text)["a"] in (1, 22)
            else:
                assert re.fullmatch(given.regex, text)


def beams(served: Served) -> None:
    from vllm.sampling_params import BeamSearchParams

    settings = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    (found,) = served.engine.beam_search(served.asked[2:3], settings)
    prompt = len(served.prompts[2])
    ends = [each.tokens[prompt:] for each in found.sequences]
    assert [len(each) for each in ends] == [4, 4]
    assert ends[0] != ends[1]
    # The first token of some beam is the likeliest.
    assert served.tokens[2][0] in {each[0] for each in ends}


def priorities(served: Served) -> None:
    for i in range(6):
        served.add(str(i), i % 3, priority=-i)
    found = served.finish()
    assert all(tokens == served.tokens[int(name) % 3] for name, tokens in found.items())
    assert {*list(found)[:TOGETHER]} == {"5", "4"}
    assert {*list(found)[-TOGETHER:]} == {"1", "0"}


def aborted(served: Served) -> None:
    assert served.all_free()
    for i in range(3):
        served.add(str(i), i)
    for _ in range(6):
        served.engine.llm_engine.step()
    served.engine.llm_engine.abort_request(["0", "2"])  # one is running, one is waiting
    assert served.finish() == {"1": served.tokens[1]}
    assert served.answers()[0].outputs[0].token_ids == served.tokens[0]
    assert served.all_free()


REQUESTS: dict[str, Callable[[Served], None]] = {
    "prefix caching": prefixes,
    "several answers": several,
    "log probabilities": probabilities,
    "structured output": structured,
    "beam search": beams,
    "priorities": priorities,
    "abort": aborted,
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_engine_serves(served: Served, name: str) -> None:
    REQUESTS[name](served)


def changed(part: str, name: str, value: object) -> Callable[["VllmConfig"], None]:
    """Return what sets an option that vLLM itself would refuse on this machine."""

    def change(config: "VllmConfig") -> None:
        setattr(getattr(config, part), name, value)

    return change


def ngram() -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def transfer(name: str, **extra: object) -> dict[str, Any]:
    given = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": given}


# Writers of models that are features themselves.
MODELS = {"experts": write_experts, "pictures": write_vision}
HOST = {"spec_name": "HostSpec", "spec_module_path": "kv_serve.vllm.offload"}
# Options of an engine, and what is set besides. Other tests run those that are served.
ENGINES: dict[str, tuple[dict[str, Any], Callable[["VllmConfig"], None] | None]] = {
    "chunked prefill": ({"max_num_batched_tokens": 64}, None),
    "embeddings": ({"runner": "pooling"}, None),
    "LoRA adapters": ({"enable_lora": True}, None),
    "tensor parallelism": ({"tensor_parallel_size": 2}, None),
    "data parallelism": ({"data_parallel_size": 2}, None),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, None),
    "context parallelism": ({}, changed("parallel_config", "decode_context_parallel_size", 2)),
    "speculative decoding, n-gram": ({"speculative_config": ngram()}, None),
    "speculative decoding, draft model": ({"speculative_config": "draft"}, None),
    "speculative decoding, heads of the model": (
        {"speculative_config": ngram()},
        changed("speculative_config", "method", "eagle"),
    ),
    "speculative decoding, others": (
        {"speculative_config": ngram()},
        changed("speculative_config", "method", "suffix"),
    ),
    "offloading to the host": (transfer("OffloadingConnector", cpu_bytes_to_use=1, **HOST), None),
    "prompts in files": (EXAMPLE | transfer("ExampleConnector", shared_storage_path="x"), None),
    "other KV connectors": (transfer("LMCacheConnectorV1"), None),
    "several KV connectors": (transfer("MultiConnector", connectors=[]), None),
    "vLLM's own cache formats": ({}, changed("cache_config", "cache_dtype", "fp8")),
    "sleep mode": ({}, changed("model_config", "enable_sleep_mode", True)),
    "mixtures of experts": ({"model": "experts"}, None),
    "pictures": ({"model": "pictures"}, None),
}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_starts_or_is_refused_by_a_sentence(
    model: Path, tmp_path: Path, name: str, kind: str
) -> None:
    from vllm import EngineArgs

    from kv_policy import parse
    from kv_serve.vllm.config import UnservableError, check_engine

    options, change = ENGINES[name]
    if options.get("speculative_config") == "draft":
        drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
        options = {"speculative_config": drafts}
    if "model" in options:
        MODELS[options["model"]](tmp_path)
        options = {"model": str(tmp_path)}
    small: dict[str, Any] = {"model": str(model), "max_model_len": 256}
    config = EngineArgs(**small | options).create_engine_config()
    if change is not None:
        change(config)
    policy = parse(POLICIES[kind])
    if getattr(listed(name), kind):
        check_engine(config, policy)
        return
    with pytest.raises(UnservableError, match=r"^(the policy .* cannot be|kv_cache_dtype is) "):
        check_engine(config, policy)


def listed(name: str) -> Feature:
    return next(each for each in FEATURES if each.name == name)


def test_a_request_that_goes_on_is_refused(served: Served) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from kv_serve.vllm.admission import check_request

    feature = listed("streamed input")
    assert (feature.slots, feature.pages) == (False, False)
    config = served.engine.llm_engine.vllm_config
    with pytest.raises(VLLMValidationError, match="needs the whole prompt in one request"):
        check_request(config, SamplingParams(), goes_on=True)


def test_every_feature_of_the_list_is_tried_here() -> None:
    tried = {*REQUESTS, *ENGINES, "streamed input"}
    assert {each.name for each in FEATURES} == tried
    assert all(listed(name).slots and listed(name).pages for name in REQUESTS)
