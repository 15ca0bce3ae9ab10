"""Engines that run on CPUs: which of ours is compared with a peer, and what processes answer."""

import json
import os
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _figures import MARGIN, comparable, compared, figures, gathered, grown
from _gguf import weights, write
from _plan import CROWDED, QUICK, WAYS, WHOLE, Cell, cell
from _processes import Process
from _protocol import Opened, answers

from tools.tables.cpu_peers import named, peers, ways

FOLDER = Path(__file__).parent.parent / "benchmarks" / "cpu_peers"
Row = dict[str, Any]


def row(engine: str, way: str, tokens: int, step: float, **more: object) -> Row:
    """What is measured of a way; ours if it is of transformers."""
    return {
        "kind": "decode",
        "batch": 1,
        "tokens": tokens,
        "engine": engine,
        "way": way,
        "ours": engine == "transformers",
        "weights": "bf16",
        "kv_bytes": 100,
        "first": 1.0,
        "step": step,
        "nats": 2.0,
        **more,
    }


ROWS = [
    row("transformers", "k8v4", 1000, 0.050, kv_bytes=40),
    row("transformers", "k8v4", 5000, 0.054, kv_bytes=40),
    row("transformers", "k4v2", 1000, 0.045, kv_bytes=20, nats=2.5),
    row("transformers", "k4v2", 5000, 0.046, kv_bytes=20, nats=2.5),
    row("vllm", "fp8", 1000, 0.050, kv_bytes=50),
    row("vllm", "fp8", 5000, 0.060, kv_bytes=50),
    row("llama.cpp", "bf16:q4_0", 1000, 0.020, kv_bytes=30, first=0.5),
    row("llama.cpp", "bf16:q4_0", 5000, 0.100, kv_bytes=30, first=0.5),
]


def test_ours_is_comparable_if_it_costs_no_more_bytes_and_nats() -> None:
    peer = row("vllm", "fp8", 1, 1.0)
    for wrong in ({"kv_bytes": 101}, {"nats": 2.0 + 1.01 * MARGIN}, {"nats": None}):
        assert not comparable(peer | wrong, peer)
    assert comparable(peer | {"nats": 2.0 + 0.99 * MARGIN}, peer)
    assert not comparable(peer, peer | {"nats": None})


def test_the_best_peer_is_compared_with_the_best_of_ours_that_may_be() -> None:
    found = figures(ROWS)
    # k4v2 is the fastest and costs nats; k8v4 costs more bytes than llama.cpp
    assert found["decode_vs_best_peer_5k_b1"] == pytest.approx(0.060 / 0.054)
    assert found["growth_vs_best_peer_b1"] == pytest.approx(2.5 / 1.0)
    assert found["growth_vs_best_peer"] == found["growth_vs_best_peer_b1"]
    assert found["ttft_vs_best_peer_1000"] == pytest.approx(0.5)
    against = [each for each in compared(ROWS) if each["figure"] == "decode_vs_best_peer_5k_b1"]
    assert [each["peer"] for each in against] == ["vllm fp8", "llama.cpp bf16:q4_0"]
    assert [each["ours"] for each in against] == ["transformers k8v4", None]


def test_a_figure_is_left_out_where_the_best_peer_is_not_comparable() -> None:
    # at 1,000 tokens llama.cpp is the fastest, and no way of ours is as small and as exact
    assert "decode_vs_best_peer_1000_b1" not in figures(ROWS)
    unknown = row("openvino", "f16:u8/u8+evict=0.25", 5000, 0.001, weights="f16", nats=None)
    assert figures([*ROWS, unknown]) == figures(ROWS)


def test_weights_of_fewer_bits_are_no_equal_work() -> None:
    quick = row("openvino", "gguf:u8/u8", 5000, 0.001, weights="gguf", kv_bytes=60)
    assert figures([*ROWS, quick]) == figures(ROWS)


def test_growth_is_of_the_shortest_and_the_longest_context() -> None:
    middle = row("vllm", "fp8", 3000, 9.9)
    found = {each["way"]: each["growth"] for each in grown([*ROWS, middle])}
    assert found["fp8"] == pytest.approx(2.5)
    assert found["k8v4"] == pytest.approx(1.0)


def test_a_growth_of_less_than_nothing_is_compared_with_nothing() -> None:
    falls = [row("vllm", "bf16", 1000, 0.05), row("vllm", "bf16", 5000, 0.04)]
    assert "growth_vs_best_peer_b1" in figures(ROWS)
    assert not [name for name in figures([*ROWS, *falls]) if name.startswith("growth")]


def test_rows_have_the_nats_of_their_way() -> None:
    measured = [
        {"kind": "nats", "engine": "vllm", "way": "fp8", "nats": 1.5},
        {
            "kind": "cell",
            "batch": 8,
            "tokens": 512,
            "equal": True,
            "ways": [{"engine": "vllm", "way": "fp8", "step": 0.1}],
        },
    ]
    about = {"kind": "decode", "batch": 8, "tokens": 512, "engine": "vllm", "way": "fp8"}
    assert gathered(measured) == [{**about, "step": 0.1, "nats": 1.5}]


def test_every_way_is_measured_once_in_a_size() -> None:
    for size in (WHOLE, QUICK):
        for each in size.cells:
            found = [*each.ways(equal=True), *each.ways(equal=False)]
            assert len({*found}) == len(found)
            left = CROWDED if each.batch * each.tokens > 32_768 else set()
            alone = {way for way in WAYS if way.spec == "full"} if each.batch > 1 else set()
            assert {way for way in WAYS if way not in found} == left | alone
    assert any(each.batch * each.tokens > 32_768 for each in WHOLE.cells)
    assert cell("8x7680") == Cell(8, 7680, 1)


class Fake:
    """An engine that answers what it was asked."""

    def open(self, way: str, prompt: list[int], batch: int, room: int) -> Opened:
        """Say how much was given."""
        return Opened(float(len(prompt)), batch * room)

    def steps(self, way: str, count: int) -> list[float]:
        """Say how often."""
        return count * [0.5]

    def close(self, way: str) -> None:
        """Do nothing."""

    def nats(self, way: str, prompt: list[int], target: list[int]) -> None:
        """Say nothing."""


def test_questions_are_answered_in_their_order() -> None:
    asked = [
        {"do": "open", "way": "w", "prompt": [1, 2, 3], "batch": 2, "room": 5},
        {"do": "steps", "way": "w", "count": 2},
        {"do": "close", "way": "w"},
        {"do": "nats", "way": "w", "prompt": [1], "target": [2]},
    ]
    out = StringIO()
    answers(Fake(), StringIO("".join(f"{json.dumps(each)}\n" for each in asked)), out)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert found == [{"first": 3.0, "kv_bytes": 10}, [0.5, 0.5], None, None]


@pytest.mark.parametrize("before", [False, True], ids=["at once", "when it has ended"])
def test_a_process_answers_and_its_end_is_noticed(tmp_path: Path, before: bool) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import json, sys\n"
        "from _protocol import own_output, put\n"
        "out = own_output()\n"
        "print('a library')\n"
        "put(out, {'it': '1'})\n"
        "put(out, json.loads(sys.stdin.readline())['count'])\n"
        "raise SystemExit(3)\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", "")))}
    process = Process((sys.executable, str(script)), path, "it")
    assert process.versions == {"it": "1"}
    assert process.ask("steps", "w", count=7) == 7
    if before:
        process._process.wait()
    with pytest.raises(RuntimeError, match="the process of it ended with 3"):
        process.ask("steps", "w", count=7)
    process.end()


def test_weights_are_written_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    own = gguf.GGMLQuantizationType.Q4_1
    stored = gguf.quants.quantize(values, own)
    writer = gguf.GGUFWriter(tmp_path / "own.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_float32("llama.rope.freq_base", 100.0)
    writer.add_tensor("weight", stored, raw_dtype=own)
    writer.add_tensor("norm", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write(tmp_path / "own.gguf", tmp_path / "made.gguf", "bf16")
    made = gguf.GGUFReader(tmp_path / "made.gguf")
    assert made.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert made.fields["llama.rope.freq_base"].contents() == 100.0
    weight, norm = made.tensors
    assert weight.tensor_type == gguf.GGMLQuantizationType.BF16
    found = gguf.quants.dequantize(weight.data, weight.tensor_type)
    np.testing.assert_allclose(found, gguf.quants.dequantize(stored, own), rtol=2**-8)
    np.testing.assert_array_equal(norm.data, values[0])
    monkeypatch.setenv("PEERS_FOLDER", str(tmp_path))
    assert weights(str(tmp_path / "own.gguf"), "gguf") == tmp_path / "own.gguf"
    with pytest.raises(ValueError, match="weights are gguf, f16 or bf16, not 'q9'"):
        weights(str(tmp_path / "own.gguf"), "q9")


@pytest.mark.model
def test_sequences_of_a_batch_hold_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER.parent)
    from ours_engine import Transformers

    engine, prompt = Transformers(1), range(100, 140)
    alone = engine.open("k8v4", prompt, 1, 4)
    engine.close("k8v4")
    several = engine.open("k8v4", prompt, 3, 4)
    assert several.kv_bytes > 2.9 * alone.kv_bytes  # page tables are in them
    assert len(engine.steps("k8v4", 2)) == 2


def test_nothing_is_measured_without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy would run in torch."""
    monkeypatch.syspath_prepend(FOLDER.parent)
    from _native import expect_native

    monkeypatch.setenv("KV_CPU_ISA", "no such set")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match="native code does not run: KV_CPU_ISA is 'no such set'"):
        expect_native()


def test_tables_leave_out_what_was_not_measured() -> None:
    assert named("llama.cpp", "bf16:q8_0") == "llama.cpp `q8_0`"
    assert named("transformers", "kv-compress:rate=4+k8v4") == (
        "transformers `kv-compress:rate=4+k8v4`"
    )
    unknown = row("openvino", "f16:u8/u8", 1000, 0.02, weights="f16", nats=None)
    rows = [*ROWS, unknown]
    *_, last = ways([*rows, *grown(ROWS)]).splitlines()
    assert last == (
        "| OpenVINO GenAI `u8/u8` | float16 | 0 | not measurable | 1.00 |  | 20.0 |  |  |"
    )
    assert "| llama.cpp `q4_0` | none |  |" in peers(compared(ROWS))
