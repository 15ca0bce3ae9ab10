"""Which rows of a step's tensors are whose, read from the device only where requests begin."""

from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kv_serve.vllm.rows import RowsBuilder

META = torch.device("meta")


@pytest.fixture
def builder() -> "RowsBuilder":
    from kv_serve.vllm.rows import RowsBuilder

    made = RowsBuilder.__new__(RowsBuilder)  # which needs nothing of an engine
    made.first = {}
    return made


def metadata(
    first: list[int] | None, index: list[int] | None, begun: tuple[int, ...] = ()
) -> "CommonAttentionMetadata":
    """Return vLLM's metadata of a decode step; without `first`, the table cannot be read."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kv_serve.vllm.adapters import indexes_requests

    index_of = {"req_idx": None if index is None else np.array(index, dtype=np.intp)}
    if not indexes_requests():
        index_of = {}
        if first is None:
            pytest.skip("vLLM 0.29 does not tell the index of a request, so the table is read")
    count = len(first or index or ())
    table = torch.empty(count, 2, device=META).int()
    if first is not None:
        table = torch.tensor(first).int()[:, None].repeat(1, 2)
    start, number = torch.arange(count + 1), torch.ones(count).int()
    return CommonAttentionMetadata(
        start,
        start,
        number,
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=1,
        block_table_tensor=table,
        slot_mapping=number,
        **index_of,
        is_prefilling=torch.tensor([each in begun for each in index or ()], dtype=torch.bool),
    )


def test_later_steps_of_the_same_requests_read_nothing(builder: "RowsBuilder") -> None:
    rows = builder.build(0, metadata([7, 4, 9], [0, 1, 5], begun=(0, 1, 5)))
    assert (rows.key, rows.start) == ((7, 4, 9), (0, 1, 2, 3))
    assert builder.build(0, metadata(None, [5, 0])).key == (9, 7)  # in any order
    assert builder.build(0, metadata(None, [1])).key == (4,)


def test_an_index_given_anew_is_read_again(builder: "RowsBuilder") -> None:
    builder.build(0, metadata([7, 4], [0, 1], begun=(0, 1)))
    assert builder.build(0, metadata([7, 3], [0, 1], begun=(1,))).key == (7, 3)
    assert builder.build(0, metadata(None, [1, 0])).key == (3, 7)
    assert builder.build(0, metadata([8, 3], [2, 1])).key == (8, 3)  # an unknown one


def test_runners_without_an_index_are_read_in_each_step(builder: "RowsBuilder") -> None:
    for first in ([7, 4], [4, 7]):
        assert builder.build(0, metadata(first, None)).key == tuple(first)


def test_requests_that_pad_a_graph_are_omitted(builder: "RowsBuilder") -> None:
    given = metadata([7, 4, 9, 9], [0, 1], begun=(0, 1))
    given.query_start_loc_cpu = torch.tensor([0, 1, 2, 2, 2])
    rows = builder.build(0, given)
    assert (rows.key, rows.start, rows.captured) == ((7, 4), (0, 1, 2), False)


def test_the_worker_gets_the_rows_before_its_step_and_fixes_memory_where_one_is_captured(
    builder: "RowsBuilder", monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_serve.vllm import rows

    connector = MagicMock()
    monkeypatch.setattr(rows, "connector_of_worker", lambda: connector)
    connector.expect.assert_not_called()
    built = builder.build(0, metadata([7, 4], [0, 1], begun=(0, 1)))
    connector.expect.assert_called_once_with(built)
    builder.vllm_config = MagicMock()
    builder.vllm_config.scheduler_config.max_num_seqs = 3
    builder.vllm_config.model_config.max_model_len = 50
    builder.connector = None
    captured = builder.build_for_cudagraph_capture(metadata([7], [0]))
    assert (captured.key, captured.captured) == ((), True)
    connector.worker.requests.fix.assert_called_once_with(3, 50)
    # A dummy run, in which the connector is disabled, launches the graph for no request.
    monkeypatch.setattr(rows, "connector_of_worker", lambda: None)
    builder.build_for_cudagraph_capture(metadata([7], [0]))
    assert connector.worker.requests.fix.call_count == 2
