"""What is written down of a model's reading: exact where the policy leaves no doubt."""

import msgspec

from kv_eval.inspection.look import inspected
from kv_eval.inspection.prompt import pieces
from kv_eval.inspection.record import Inspection
from kv_runtime import serving
from kv_transformers import CompressedCache
from kv_transformers.models import LoadedModel

PROMPT = "The harbour was quiet that morning, and the boats lay still."  # 60 tokens


def look(loaded: LoadedModel, policy: str, text: str = PROMPT) -> Inspection:
    prompt = pieces(loaded.tokenizer, text, special=True)
    cache = CompressedCache(loaded.model, policy)
    found = inspected(loaded, cache, prompt, serving("cpu"))
    report = cache.memory()
    assert (found.kv_bytes, found.full_bytes) == (report.total_bytes, report.full_bytes)
    assert sum(found.memory.values()) == found.kv_bytes
    assert found.kept == tuple(map(tuple, report.tokens[:, 0].tolist()))
    return found


def test_streaming_is_written_down_exactly(loaded: LoadedModel) -> None:
    found = look(loaded, "streaming:budget=12,sinks=2")
    assert found.policy == "streaming:budget=12,sinks=2"
    assert (found.layers, found.heads, found.all_heads) == (2, 2, 4)
    head = "00" + "." * 48 + "0" * 10
    assert found.held == ((head, head), (head, head))
    assert found.kept == ((12, 12), (12, 12))
    assert [token.held for token in found.tokens] == [(4,)] * 2 + [(0,)] * 48 + [(4,)] * 10
    assert "".join(token.text for token in found.tokens) == PROMPT
    (place,) = found.places
    assert (place.name, place.kind, place.tokens) == ("raw", "tier", 48)
    assert place.bytes == 48 * (2 * 8 * 4 + 8)  # two float32 vectors of 8; a score and a position
    assert found.missing == 4 * 48


def test_a_window_and_what_left_it(loaded: LoadedModel) -> None:
    found = look(loaded, "k8v4:window=16")
    head = "0" * 44 + "1" * 16
    assert found.held == ((head, head), (head, head))
    k8v4, window = found.places
    assert (k8v4.name, k8v4.kind, k8v4.tokens) == ("k8v4", "tier", 4 * 44)
    assert k8v4.bytes == 4 * 44 * ((8 + 4) + (4 + 4))
    assert (window.name, window.kind, window.tokens) == ("raw window", "window", 4 * 16)
    assert window.bytes == found.memory["window_bytes"]
    assert (found.missing, found.ratio) == (0, found.kv_bytes / found.full_bytes)


def test_leankv_sums_to_what_the_cache_says(loaded: LoadedModel) -> None:
    found = look(loaded, "leankv:t_high=0.6,t_low=0.3,window=8")
    assert [place.name for place in found.places] == ["k8v4", "k4v2", "raw window"]
    assert all(place.tokens for place in found.places)
    assert found.missing > 0
    every = found.all_heads * len(found.tokens)
    assert sum(place.tokens for place in found.places) + found.missing == every
    names = ("vector_bytes", "score_bytes", "position_bytes")
    in_pages = sum(found.memory[name] for name in names)
    assert found.places[0].bytes + found.places[1].bytes == in_pages
    for i, place in enumerate(found.places):
        assert sum(head.count(str(i)) for layer in found.held for head in layer) == place.tokens
        assert sum(token.held[i] for token in found.tokens) == place.tokens
    for i, token in enumerate(found.tokens):
        kept = sum(head[i] != "." for layer in found.held for head in layer)
        assert found.share(token) == kept / 4


def test_the_file_says_all_of_it(loaded: LoadedModel) -> None:
    found = look(loaded, "snapkv:budget=20,window=4,pool=3")
    assert msgspec.json.decode(found.encoded(), type=Inspection) == found
    plain = msgspec.json.decode(found.encoded())
    assert list(plain) == [
        *("model", "policy", "attention", "versions", "layers", "heads", "kv_bytes", "full_bytes"),
        *("memory", "places", "tokens", "kept", "held"),
    ]
    assert plain["tokens"][0] == {
        **{"id": found.tokens[0].id, "text": "T"},
        "held": list(found.tokens[0].held),
    }
    assert {len(head) for layer in plain["held"] for head in layer} == {60}


def test_a_prompt_of_one_token(loaded: LoadedModel) -> None:
    found = look(loaded, "k8v4", "x")
    assert [token.held for token in found.tokens] == [(4,)]
    assert found.held == (("0", "0"), ("0", "0"))
