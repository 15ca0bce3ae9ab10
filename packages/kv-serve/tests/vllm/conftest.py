"""Engines in the test process, and tiny models for them."""

import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kept_models import folder_of
from kv_serve.vllm.versions import minor
from vllm_models import skip_without_vllm, write_config, write_weights

if TYPE_CHECKING:
    from vllm import LLM

    from kv_policy import CacheShape, KVPolicy
    from kv_serve.vllm.spec import PagedManager
    from paged_engine import Engine

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, if vLLM is not installed."""
    skip_without_vllm(items, HERE)


@pytest.fixture(scope="session", autouse=True)
def _quiet_engines() -> None:
    """Run engines in this process without compilation, which would dominate the test time."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # After drafting from the prompt, vLLM gives torch as many threads as numba has, one per core.
    if "OMP_NUM_THREADS" in os.environ:
        os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Create the folder of a tiny model; its weights are drawn when it is loaded."""

    def folder(architecture: str = "LlamaForCausalLM", kind: str = "llama", **more: Any) -> str:
        made = tmp_path_factory.mktemp(kind)
        write_config(made, architecture, kind, **more)
        return str(made)

    return folder


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Create the folder of a model with layers of several kinds, once."""

    @functools.cache
    def folder(name: str, *, weights: bool = True, **more: Any) -> str:
        return folder_of(tmp_path_factory.mktemp(name), name, weights=weights, **more)

    return folder


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model with float32 weights."""
    folder = tmp_path_factory.mktemp("llama")
    write_weights(folder)
    return str(folder)


@pytest.fixture(scope="session")
def statistics(weights: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a file of noise statistics for fitting a basis to those weights."""
    from noise_statistics import write_statistics

    path = tmp_path_factory.mktemp("statistics") / "of-noise"
    return str(write_statistics(Path(weights), path))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Random prompts for a tiny model: the two longest take several pages."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 256, (n,), generator=draw).tolist() for n in (150, 129, 40)]


def _forget_groups() -> None:
    """Let the next engine make its groups of processes: one that failed leaves its own."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()


def _forget_connector() -> None:
    """Release the worker's connector, which vLLM keeps for the whole process."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    ensure_kv_transfer_shutdown()


@pytest.fixture(scope="session")
def _few_objects() -> Iterator[Callable[[], None]]:
    """Yield what keeps all objects there are out of garbage collection.

    vLLM runs it ten times for an engine, over all that tests and earlier engines imported.
    """
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.worker.cpu_worker
    from vllm.platforms.cpu import CpuPlatform

    freeze = gc.freeze

    def leave_out() -> None:
        gc.collect()  # what an earlier engine left would stay otherwise
        freeze()

    with pytest.MonkeyPatch.context() as patch:
        # vLLM freezes the objects of an engine, and later unfreezes all.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        # For each engine vLLM looks for its Triton kernels in all modules, and fails at one of
        # llvmlite, which n-gram drafting imports. Once is enough for a process. 0.29 and 0.30 do
        # not look.
        if (minor(vllm.__version__) or (0, 0)) > (0, 30):
            register = functools.cache(CpuPlatform.register_triton_kernel_overrides)
            patch.setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(register))
        yield leave_out
    gc.unfreeze()


@pytest.fixture(scope="session")
def start(_few_objects: Callable[[], None]) -> Callable[..., AbstractContextManager["LLM"]]:
    """Run engines of any model in this process, one at a time, as they share global state."""

    @contextmanager
    def running(
        model: str, policy: object = None, poison: bool = False, **options: Any
    ) -> Iterator["LLM"]:
        import torch
        import vllm
        from vllm import LLM

        before = torch.get_default_dtype()
        named: dict[str, object] = {} if policy is None else {"kv_policy": policy}
        named |= {"kv_poison": True} if poison else {}
        given = {"enforce_eager": True, "additional_config": named} | options
        _few_objects()
        try:
            engine = LLM(model, **given)
            try:
                if "speculative_config" in options and minor(vllm.__version__) == (0, 30):
                    pytest.skip("vLLM 0.30 cannot verify drafts on a CPU")
                yield engine
            finally:
                engine.llm_engine.engine_core.shutdown()
        finally:
            torch.set_default_dtype(before)  # 0.29 leaves another if a model is not loaded
            _forget_connector()
            _forget_groups()

    return running


@pytest.fixture(scope="session")
def engine_class() -> "type[Engine]":
    """Return the simulated engine without a model; imported lazily, as it imports vLLM."""
    from paged_engine import Engine

    return Engine


@pytest.fixture(scope="session")
def manager_of() -> Callable[..., "PagedManager"]:
    """Create our manager for a policy and a shape, over a number of vLLM's blocks."""
    from paged_engine import account_of, manager_of

    account = functools.cache(account_of)

    def made(
        policy: "KVPolicy", shape: "CacheShape", blocks: int, kept: bool = False
    ) -> "PagedManager":
        return manager_of(account(policy, shape), blocks, kept=kept)

    return made


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the folder of the real model."""
    from kv_transformers.models import model_folder

    return str(model_folder())


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[list[int]]]:
    """Generate greedily from token ids, and return the new ones."""

    def run(engine: "LLM", prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = engine.generate(asked, settings, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    return run


@pytest.fixture(scope="session")
def patterns(smollm2: str) -> list[tuple[list[int], list[int]]]:
    """Prompts of 168 to 572 tokens, and the 24 expected next tokens, all predicted clearly."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    week = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, "
    fox = "The red fox jumps over the green fence, and the old dog sleeps under the tall tree. "
    rows = [f"row {i}: left {i}, right {i}\n" for i in range(1, 61)]
    found = []
    for text, more in ((week * 12, week * 4), (fox * 20, fox * 4), (rows[:40], rows[40:])):
        prompt = tokenizer.encode("".join(text).rstrip())
        both = tokenizer.encode("".join((*text, *more)))
        assert both[: len(prompt)] == prompt
        found.append((prompt, both[len(prompt) : len(prompt) + 24]))
    return found
