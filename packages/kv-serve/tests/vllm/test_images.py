"""A model that reads pictures: their tokens are compressed as those of the text around them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

from vllm_models import write_vision

if TYPE_CHECKING:
    from PIL.Image import Image
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
COUNT, SIDE = 12, 64
PAGES = "kv-compress:budget=24,window=8+k8v4"
WHOLE = "streaming:budget=4096"  # keeps all tokens, in pages
TEXT = "What is this? <image> Say it in the words of those who saw it first, and in no others."
OPTIONS: dict[str, Any] = {
    "kv_cache_memory_bytes": 1 << 21,
    "max_model_len": 256,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tiny model that reads pictures."""
    folder = tmp_path_factory.mktemp("vision")
    write_vision(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pictures() -> "list[Image]":
    """Return two pictures of noise."""
    import torch
    from PIL import Image

    draw = torch.Generator().manual_seed(5)
    sizes = (2, SIDE, SIDE, 3)
    return [
        Image.fromarray(each.numpy())
        for each in torch.randint(0, 256, sizes, generator=draw, dtype=torch.uint8)
    ]


def answers(engine: "LLM", pictures: "list[Image]") -> list[tuple[list[int], int]]:
    """Return the tokens of an answer about each picture, and how many of its prompt were cached."""
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    asked = [{"prompt": TEXT, "multi_modal_data": {"image": picture}} for picture in pictures]
    found = engine.generate(asked, settings, use_tqdm=False)
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in found]


def by_transformers(folder: str, policy: str, pictures: "list[Image]") -> list[list[int]]:
    """Generate greedily about each picture in transformers."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from kv_transformers import CompressedCache, passing

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    found = []
    for picture in pictures:
        read = processor(images=[picture], text=TEXT, return_tensors="pt")
        out = model.generate(
            **read,
            **passing(model, CompressedCache(model, policy, page_tokens=OPTIONS["block_size"])),
            do_sample=False,
            min_new_tokens=COUNT,
            max_new_tokens=COUNT,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, read["input_ids"].shape[1] :].tolist())
    return found


@pytest.mark.parametrize("policy", ["k8v4", PAGES])
def test_answers_about_pictures_are_those_of_transformers(
    start: Start, vision: str, pictures: "list[Image]", policy: str
) -> None:
    expected = by_transformers(vision, policy, pictures)
    assert expected[0] != expected[1]
    with start(vision, policy, **OPTIONS) as engine:
        found = answers(engine, pictures)
        again = answers(engine, pictures)
    assert found == [(tokens, 0) for tokens in expected]
    if policy == PAGES:
        assert again == found
    else:  # what is read after a prefix attends to it as it is stored
        assert all(count for _, count in again)


@pytest.mark.slow
def test_uncompressed_answers_are_those_of_vllm_alone(
    start: Start, vision: str, pictures: "list[Image]"
) -> None:
    found = []
    for policy in (None, "raw", WHOLE):
        with start(vision, policy, poison=policy == WHOLE, **OPTIONS) as engine:
            both = [answers(engine, pictures) for _ in range(2)]  # then with prefixes
            found.append([[tokens for tokens, _ in each] for each in both])
    assert found[0] == found[1] == found[2]
