"""Comparing with peers: the choice, the bytes, the rows that scripts print."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _choose import Candidate, best, winner
from _held import Held, held
from _partial import Partial
from _samples import asks, of
from _scripts import printed
from _ways import asked, claimed
from _widened import widen
from _work import FULL, Ask, Cell, Work, checked, named, put
from torch import nn

from kv_eval.tasks import Sample

ROW = {
    "way": "tova",
    "task": "needle",
    "setting": "aware",
    "sample": 0,
    "kv_bytes": 50,
    "storage_bytes": 40,
    "full_bytes": 100,
    "tokens": [7],
    "nats": None,
    "seconds": 0.5,
}
CELL = ("needle", "aware")


def candidate(way: str, score: float, share: float, environment: str = "kvpress") -> Candidate:
    return Candidate(environment, way, (score, score), share)


def test_the_best_at_no_more_bytes_is_chosen() -> None:
    each = [candidate("a", 0.5, 0.2), candidate("b", 0.75, 0.25), candidate("c", 1.0, 0.252)]
    chosen = [best(each, budget) for budget in (0.1, 0.2, 0.25, 0.5)]
    assert [c.way if c else None for c in chosen] == [None, "a", "b", "c"]


def test_a_thousandth_is_given_for_rounding_to_tokens() -> None:
    assert best([candidate("a", 1.0, 0.2509)], 0.25) is not None
    assert best([candidate("a", 1.0, 0.2511)], 0.25) is None


def test_lower_is_better_where_it_is_said_and_equal_ones_go_by_bytes_then_names() -> None:
    each = [candidate("z", 0.5, 0.2), candidate("y", 0.5, 0.1), candidate("x", 0.75, 0.1)]
    low, high = best(each, 0.5, least=True), best(each, 0.5)
    assert low is not None
    assert high is not None
    assert (low.way, high.way) == ("y", "x")
    equal = best([candidate("b", 1.0, 0.1), candidate("a", 1.0, 0.1)], 0.5)
    assert equal is not None
    assert equal.way == "a"


def test_the_winner_is_the_higher_or_for_nats_the_lower() -> None:
    assert winner(0.5, 0.25) == "ours"
    assert winner(0.5, 0.25, least=True) == "peer"
    assert winner(0.25, 0.5, least=True) == "ours"
    assert winner(0.1 + 0.2, 0.3) == "equal"


class Wrapped(torch.Tensor):
    """Stands for a quantized tensor: it says it has 64 bytes, and is made of 9."""

    @staticmethod
    def __new__(cls) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, (4, 4), dtype=torch.float32)

    def __init__(self) -> None:
        self._codes, self._scale = torch.zeros(8, dtype=torch.uint8), torch.zeros(1).char()

    @classmethod
    def __torch_dispatch__(cls, *given: object) -> None:
        raise AssertionError("bytes are those of what it is made of; nothing is computed")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_codes", "_scale"], None


def test_bytes_are_those_of_tensors_and_of_the_memory_behind_them() -> None:
    whole = torch.zeros(10, 2)  # 80 bytes
    sliced = SimpleNamespace(layers=[SimpleNamespace(keys=whole[:5], values=[torch.zeros(3)])])
    assert held(sliced) == Held(tensors=40 + 12, storages=80 + 12)
    shared = {"one": whole, "again": whole, "view": whole.T}
    assert held(shared) == Held(tensors=80 + 80, storages=80)


def test_what_lies_beside_the_cache_counts_and_the_model_does_not() -> None:
    model = nn.Linear(8, 8)
    cache = SimpleNamespace(model=model, of=type("C", (), {"weight": torch.zeros(99)}))
    assert held(cache) == Held(0, 0)
    assert held(cache, torch.zeros(4, dtype=torch.long)) == Held(32, 32)


def test_a_tensor_made_of_others_counts_as_those() -> None:
    assert held([Wrapped()]) == Held(tensors=9, storages=9)


def test_widened_layers_give_what_they_gave() -> None:
    torch.manual_seed(0)
    plain, biased = nn.Linear(64, 48, bias=False), nn.Linear(48, 8)
    model = nn.Sequential(plain, biased).bfloat16()
    x = torch.randn(2, 5, 64).bfloat16()
    exact = x.double() @ plain.weight.double().T
    before = model(x)
    widen(model)
    assert plain(x).dtype == torch.bfloat16
    torch.testing.assert_close(plain(x).double(), exact, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(model(x), before, rtol=2**-5, atol=2**-7)
    one = x[:, :1]
    assert torch.equal(plain(one), nn.functional.linear(one, plain.weight))


def test_a_row_has_exactly_the_fields_it_should_have() -> None:
    assert checked(ROW) is ROW
    assert checked({**ROW, "tokens": [], "nats": 2.5})["nats"] == 2.5
    assert checked({**named(("a", *CELL, 0)), "error": "no"})
    assert checked({"way": "a", "round": 1, "prefill": 2.0, "decode": 0.1})
    for wrong in ({**ROW, "more": 1}, {**ROW, "kv_bytes": 0.5}, {**ROW, "sample": True}):
        with pytest.raises(ValueError, match=r"more|kv_bytes|sample"):
            checked(wrong)
    with pytest.raises(ValueError, match="seconds"):
        checked({name: value for name, value in ROW.items() if name != "seconds"})


def test_rows_are_json_lines_and_no_number_is_none_at_all() -> None:
    out = io.StringIO()
    put(out, ROW)
    put(out, {**ROW, "sample": 1})
    assert [json.loads(line)["sample"] for line in out.getvalue().splitlines()] == [0, 1]
    with pytest.raises(ValueError, match="JSON"):
        put(out, {**ROW, "nats": float("nan")})


def work(done: frozenset[tuple[str, str, str, int]] = frozenset()) -> Work:
    given = (Ask((1, 2), (3,)), Ask((4,), (5, 6), (7,), 8, stop=False))
    return Work("folder", (2,), (Cell("nll", "agnostic", ("full", "a"), given),), done, rounds=3)


def test_work_is_read_as_it_was_written(tmp_path: Path) -> None:
    given = work(frozenset({("a", "nll", "agnostic", 0)}))
    given.write(tmp_path / "work.json")
    assert Work.read(tmp_path / "work.json") == given


def test_only_what_is_not_done_is_asked() -> None:
    given = work(frozenset({("full", "nll", "agnostic", i) for i in (0, 1)}))
    assert [(i, ways) for _, i, _, ways in given.open()] == [(0, ("a",)), (1, ("a",))]
    every = frozenset({(way, "nll", "agnostic", i) for way in ("full", "a") for i in (0, 1)})
    assert not list(work(every).open())


def script(tmp_path: Path, text: str) -> tuple[str, str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return sys.executable, str(path)


def test_what_libraries_print_is_no_row(tmp_path: Path) -> None:
    folder = Path(__file__).parent.parent / "benchmarks" / "peers"
    text = f"""
import sys
sys.path.insert(0, {str(folder)!r})
from _work import Work, put, rows_out
print("before")
sys.stdout.flush()
"""
    with pytest.raises(json.JSONDecodeError):
        list(printed(script(tmp_path, text), work()))
    text = (
        text.replace('print("before")\nsys.stdout.flush()', "")
        + f"""
from pathlib import Path
out = rows_out()
print("a library")
row = {ROW!r}
put(out, row | {{"sample": len(Work.read(Path(sys.argv[1])).cells)}})
"""
    )
    assert list(printed(script(tmp_path, text), work())) == [{**ROW, "sample": 1}]


def test_scripts_that_run_together_share_the_cores(tmp_path: Path) -> None:
    text = f"""
import os, json
print(json.dumps({ROW!r} | {{"sample": int(os.environ["OMP_NUM_THREADS"])}}))
"""
    assert [row["sample"] for row in printed(script(tmp_path, text), work(), 3)] == [3]


def test_a_script_that_fails_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3"):
        list(printed(script(tmp_path, "raise SystemExit(3)"), work()))


def test_rows_are_gone_on_with_and_a_line_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results" / "peers.partial"
    first = Partial(path, {"samples": "s"})
    first.take("kvpress", "c1", {"versions": {"torch": "2"}})
    first.take("kvpress", "c1", ROW)
    first.take("kvpress", "c2", {**ROW, "sample": 1})
    with path.open("a") as file:
        file.write('{"environment": "kvpr')
    again = Partial(path, {"samples": "s"})
    assert again.done("kvpress") == {("tova", *CELL, 0), ("tova", *CELL, 1)}
    assert again.versions == {"kvpress": {"torch": "2"}}
    assert {row["commit"] for row in again.rows["kvpress"].values()} == {"c1", "c2"}
    again.take("kvpress", "c2", {**ROW, "sample": 2})
    assert len(Partial(path, {"samples": "s"}).done("kvpress")) == 3
    assert not Partial(path, {"samples": "other"}).done("kvpress")
    assert path.with_name("peers.partial.aside-2").is_file()


def test_one_task_and_one_setting_are_found() -> None:
    cells = [("needle", "aware"), ("needle", "agnostic"), ("nll", "agnostic")]
    samples: dict[tuple[str, str], tuple[Sample, ...]] = dict.fromkeys(cells, ())
    assert list(of(samples, None, None)) == cells
    assert list(of(samples, "needle", None)) == cells[:2]
    assert list(of(samples, None, "agnostic")) == cells[1:]
    assert list(of(samples, "needle", "aware")) == cells[:1]
    with pytest.raises(ValueError, match="no samples of nll aware; there are needle aware, need"):
        of(samples, "nll", "aware")


def test_a_quick_run_asks_each_method_once() -> None:
    chosen = asked("kvpress", "aware", quick=True)
    assert chosen[0] == FULL
    assert len({way.partition(":")[0] for way in chosen if "quanto" not in way}) == 9
    assert "snapkv:keep=0.5" in chosen
    assert "snapkv:keep=0.25" not in chosen
    assert asked("kvzip", "aware", quick=False) == ()
    assert len(asked("kvzip", "agnostic", quick=False)) == 3


def test_what_masks_says_less_than_it_holds() -> None:
    assert claimed("kvzip:keep=0.125") == 0.125
    assert claimed("adakv-expected-attention:keep=0.5") == 0.5
    assert claimed("snapkv:keep=0.25") is None
    assert claimed(FULL) is None


def test_asks_have_all_but_what_is_right() -> None:
    (ask,) = asks((Sample("needle", "aware", (1,), (2,), answers=("41",), new_tokens=4),))
    assert ask == Ask((1,), (2,), (), 4, stop=True)
