"""TokenStore by example: page contents, errors, and that errors change nothing."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool, PoolExhausted, TokenStore, page_kernels_of, torch_kernels
from kv_paging.checks import expect_cover, expect_field, expect_shape
from kv_paging.kernels import declined
from kv_paging.reference import ReferenceStore, stored
from kv_policy import (
    Backend,
    PageLayout,
    RawCodec,
    RunningMean,
    TokenFormat,
    installed_backends,
)

FORMAT = TokenFormat(RawCodec(4, torch.float32), RawCodec(2, torch.bfloat16))
LAYOUT = PageLayout.sized(FORMAT, 4, scores=True, positions=True)


def make(
    layout: PageLayout = LAYOUT,
    pages: int | None = None,
    sequences: int = 2,
    kernels: str | None = None,
) -> TokenStore:
    pool = PagePool(layout.nbytes, pages or 0, grows=pages is None, poison=True, kernels=kernels)
    return TokenStore(pool, layout, layers=2, sequences=sequences, heads=2)


def tokens(table_rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw keys, values, a full `keep`, scores and positions."""
    position = torch.arange(length).expand(table_rows, length)
    return (
        torch.randn(table_rows, length, 4),
        torch.randn(table_rows, length, 2).bfloat16(),
        torch.ones(table_rows, length, dtype=torch.bool),
        torch.rand(table_rows, length),
        position,
    )


def fill(some: TokenStore, length: int) -> None:
    some.append(some.table_rows(), *tokens(len(some.table_rows()), length))


def snapshot(some: TokenStore) -> tuple[list, list, list, int]:
    return some.table.tolist(), some.length.tolist(), some.pool.data.tolist(), some.pool.free


def test_stored_tokens_are_encoded_anew_as_if_they_had_been_read() -> None:
    some, wide = (
        make(),
        replace(LAYOUT, format=TokenFormat(*[RawCodec(d, torch.float16) for d in (4, 2)])),
    )
    fill(some, 7)
    rows = torch.tensor([5, 0, 3])
    marks = torch.rand(3, 9) < 0.5
    read = some.read(rows, frozenset({"keys", "values"}))
    found = []
    for stored_as in (False, True):
        other = make(PageLayout.sized(wide.format, 3, scores=True, positions=True))
        if stored_as:
            (source,) = some.copied(rows)
            some.pool.data.fill_(255)
            other.append_stored(rows, source, marks)
        else:
            own = (read.key, read.value, marks[:, :7], read.score, read.position)
            other.append(rows, *own)
        found.append(snapshot(other))
    assert found[0] == found[1]


def test_stored_tokens_that_do_not_match_are_refused() -> None:
    some = make()
    fill(some, 3)
    (source,) = some.copied(torch.tensor([0, 1]))
    rows, marks = torch.tensor([0, 1]), torch.ones(2, 3, dtype=torch.bool)
    before = snapshot(some)
    with pytest.raises(ValueError, match="the source has 2 rows of 1 heads for 1 table rows"):
        some.append_stored(rows[:1], source, marks[:1])
    plain = replace(source, layout=PageLayout.sized(FORMAT, 4))
    with pytest.raises(ValueError, match="are stored here and not in the source"):
        some.append_stored(rows, plain, marks)
    narrow = TokenFormat(RawCodec(3, torch.float32), RawCodec(2, torch.bfloat16))
    other = replace(source, layout=PageLayout.sized(narrow, 4, scores=True, positions=True))
    with pytest.raises(ValueError, match=r"keys and values of \(3, 2\) dimensions; \(4, 2\) are"):
        some.append_stored(rows, other, marks)
    with pytest.raises(ValueError, match="a row is named twice or does not exist"):
        some.copied(torch.tensor([0, 0]))
    assert snapshot(some) == before


def test_table_rows_are_numbered_layer_by_layer() -> None:
    some = make()
    assert some.table_rows().tolist() == list(range(8))
    assert some.table_rows(slice(1, 2)).tolist() == [4, 5, 6, 7]


def test_a_view_is_one_layer_as_the_contract_says() -> None:
    some = make()
    key, value, keep, score, position = tokens(4, 6)
    some.append(some.table_rows(slice(1, 2)), key, value, keep, score, position)
    view = some.view(1)
    assert view.layout is LAYOUT
    assert view.length.tolist() == [[6, 6], [6, 6]]
    page = int(view.table[1, 0, 5 // 4])  # token 5 of head 0 of sequence 1
    start, _, width = LAYOUT.segments[0]
    row = view.data[page, start + (5 % 4) * width :][:width]
    assert torch.equal(row.view(torch.float32), key[2, 5])
    assert some.view(0).length.tolist() == [[0, 0], [0, 0]]


def test_heads_keep_different_tokens() -> None:
    some = make(sequences=1)
    key, value, _, score, position = tokens(4, 5)
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0]]).bool()
    some.append(some.table_rows(), key, value, keep, score, position)
    read = some.read(some.table_rows(), frozenset({"keys", "values"}))
    assert some.length.flatten().tolist() == [5, 0, 2, 1]
    assert some.pages_used == 2 + 0 + 1 + 1 == some.pool.used
    assert read.position is not None
    assert read.key is not None
    assert read.value is not None
    assert read.position.tolist()[1:] == [[-1] * 5, [1, 3, -1, -1, -1], [0, -1, -1, -1, -1]]
    assert torch.equal(read.key[2, :2], key[2, [1, 3]])
    assert torch.equal(read.value[0], value[0])
    assert read.key.dtype == torch.float32
    assert read.value.dtype == torch.bfloat16


def test_reading_nothing() -> None:
    some = make()
    read = some.read(some.table_rows(), frozenset({"keys", "values"}))
    assert read.held.shape == (8, 0)
    assert read.key is not None
    assert read.key.shape == (8, 0, 4)
    score, slot = some.weakest(some.table_rows())
    assert score.isposinf().all()
    assert slot.tolist() == [-1] * 8
    assert some.compact(some.table_rows(), torch.ones(8, 0, dtype=torch.bool)) == 0
    fetched = some.fetch(some.table_rows(), torch.full((8,), -1))
    assert fetched.held.tolist() == [[False]] * 8
    assert some.pool.capacity == 0


def test_long_prompts_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = make(), make(kernels="torch")
    ids, (key, value, keep, score, position) = whole.table_rows(), tokens(8, 9)
    keep = torch.rand(8, 9) < 0.5
    whole.append(ids, key, value, keep, score, position)
    monkeypatch.setattr(torch_kernels, "_ROWS", 5)
    pieces.append(ids, key, value, keep, score, position)
    assert stored(whole) == stored(pieces)


def test_strided_vectors_are_stored_as_they_are() -> None:
    some, oracle = make(), ReferenceStore(LAYOUT, 2, 2, 2)
    key, value, keep, score, position = tokens(8, 5)
    key = key.transpose(0, 1).contiguous().transpose(0, 1)
    value = value.repeat_interleave(2, dim=1)[:, ::2]
    for one in (some, oracle):
        one.append(some.table_rows(), key, value, keep, score, position)
    assert stored(some) == oracle.tokens


def test_compacting_moves_the_last_into_the_holes_and_frees_pages() -> None:
    some = make(sequences=1)
    fill(some, 10)
    keep = torch.zeros(4, 10, dtype=torch.bool)
    keep[:, [0, 5, 8, 9]] = True
    assert some.compact(some.table_rows(), keep) == 4 * 2
    position = some.read(some.table_rows()).position
    assert position is not None
    assert position.tolist() == [[0, 5, 8, 9]] * 4


def test_beams_share_nothing() -> None:
    some = make()
    fill(some, 5)
    some.select(torch.tensor([1, 1, 0]))
    assert some.length.shape == (2, 3, 2)
    before = stored(some)
    assert before[0] == before[2] != before[4]
    ids = some.table_rows()[:2]
    key, value, _, score, position = tokens(2, 1)
    some.replace(ids, torch.zeros(2).long(), key[:, 0], value[:, 0], score[:, 0], position[:, 0])
    after = stored(some)
    assert after[0] != before[0]
    assert after[2] == before[2]
    some.pool.check(some.pages())


def test_two_tiers_share_a_pool() -> None:
    first = make(sequences=1)
    small = PageLayout.fitted(
        TokenFormat(RawCodec(4, torch.bfloat16), RawCodec(2, torch.bfloat16)), LAYOUT.nbytes
    )
    second = TokenStore(first.pool, small, layers=2, sequences=1, heads=2)
    fill(first, 3)
    key, value, keep, _, _ = tokens(4, 9)
    second.append(second.table_rows(), key, value, keep)
    assert first.pool.used == first.pages_used + second.pages_used == 4 + 4
    first.pool.check(torch.cat((first.pages(), second.pages())))
    first.clear(torch.tensor([0]))
    assert first.pool.used == second.pages_used
    assert second.read(second.table_rows()).score is None


def test_tables_are_small_and_counted() -> None:
    some = make(sequences=1)
    fill(some, 4 * 100)
    lengths_and_ids = (4 + 8) * 4
    assert some.table_bytes == 4 * some.table.numel() + lengths_and_ids
    assert some.table.shape[-1] < 100 * 9 / 8 + 1


def test_a_dry_pool_changes_nothing() -> None:
    some = make(pages=8)
    fill(some, 3)
    before = snapshot(some)
    with pytest.raises(PoolExhausted, match="8 pages are needed and 0 are free") as error:
        fill(some, 2)
    assert (error.value.needed, error.value.free) == (8, 0)
    assert snapshot(some) == before
    with pytest.raises(PoolExhausted, match="4 pages are needed and 0 are free"):
        some.select(torch.tensor([0, 1, 1]))
    assert snapshot(some) == before
    some.select(torch.tensor([1, 1]))  # the pages released by sequence 0 suffice
    assert some.pool.free == 0


@dataclass(frozen=True)
class Moody:
    """A codec that raises for vectors that begin with 13."""

    dim: int = 4
    block: int = 1
    parts: tuple[int] = (4,)
    layout: None = None

    def encode(self, x: Tensor) -> Tensor:
        if (x[..., 0] == 13).any():
            raise ArithmeticError("13")
        return x[:, 0].to(torch.uint8)

    def decode(self, data: Tensor) -> Tensor:
        return data[:, None].float()

    def bound(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


def test_a_codec_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernels, "_ROWS", 3)
    some = make(PageLayout.sized(TokenFormat(Moody(), Moody()), 2))
    vectors = torch.ones(8, 3, 4)
    keep = torch.ones(8, 3, dtype=torch.bool)
    some.append(some.table_rows(), vectors, vectors, keep)
    before, used = stored(some), some.pool.used
    bad = vectors.clone()
    bad[5, 1, 0] = 13
    with pytest.raises(ArithmeticError):
        some.append(some.table_rows(), vectors, bad, keep)
    with pytest.raises(ArithmeticError):
        some.replace(some.table_rows(), torch.zeros(8).long(), 2 * vectors[:, 0], bad[:, 1])
    assert stored(some) == before
    assert some.pool.used == used
    some.pool.check(some.pages())


@dataclass(frozen=True)
class Pairs(RawCodec):
    """A codec that encodes two tokens together."""

    @property
    def block(self) -> int:
        return 2


def test_what_a_store_cannot_be_made_of() -> None:
    pool = PagePool(LAYOUT.nbytes)
    with pytest.raises(ValueError, match=r"pages of 128 bytes and the pool's have 64"):
        TokenStore(PagePool(64), PageLayout(FORMAT, 4, 128), 1, 1, 1)
    pairs = TokenFormat(Pairs(4, torch.float32), Pairs(2, torch.bfloat16))
    with pytest.raises(ValueError, match="encodes 2 tokens together"):
        TokenStore(pool, PageLayout(pairs, 4, LAYOUT.nbytes), 1, 1, 1)
    with pytest.raises(ValueError, match="1 layers, 0 sequences and 2 heads make no table row"):
        TokenStore(pool, LAYOUT, 1, 0, 2)


def test_arguments_that_do_not_fit_are_refused_with_a_sentence() -> None:
    some = make()
    fill(some, 3)
    before = snapshot(some)
    ids, (key, value, keep, score, position) = some.table_rows(), tokens(8, 2)
    first = torch.zeros(8).long()
    with pytest.raises(ValueError, match=r"key has the shape \(8, 2, 3\); it must be \(8, 2, 4\)"):
        some.append(ids, key[..., :3], value, keep, score, position)
    with pytest.raises(ValueError, match="value has the shape"):
        some.replace(ids, first, key[:, 0], value[:, 0, :1], score[:, 0], position[:, 0])
    with pytest.raises(ValueError, match="a score per token and none is given"):
        some.append(ids, key, value, keep, None, position)
    with pytest.raises(ValueError, match="a position per token and none is given"):
        some.append(ids, key, value, keep, score)
    for wrong in (torch.tensor([0, 1, 0]), torch.tensor([8]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=r"named twice or does not exist.*from 0 to 7"):
            some.read(wrong)
    with pytest.raises(ValueError, match="slot 3 holds no token, the table row has 3"):
        some.remove(ids, torch.tensor([0, 0, 3, 0, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="slot -2 holds no token"):
        some.fetch(ids, first - 2)
    with pytest.raises(ValueError, match="slot 7 holds no token"):
        some.replace(ids, first + 7, key[:, 0], value[:, 0], score[:, 0], position[:, 0])
    with pytest.raises(ValueError, match=r"keep covers 2 slots and the longest .* holds 3"):
        some.compact(ids, keep)
    with pytest.raises(ValueError, match="score covers 2 slots"):
        some.set_scores(ids, score)
    with pytest.raises(ValueError, match="sequence 2 is out of range; it must be from 0 to 1"):
        some.select(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="no sequence is selected"):
        some.select(torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="sequence -1 is out of range"):
        some.clear(torch.tensor([-1]))
    with pytest.raises(ValueError, match="named twice"):
        some.clear(torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"length is \[1, -1\]"):
        some.truncate(torch.tensor([1, -1]))
    with pytest.raises(ValueError, match=r"length has the shape \(3,\)"):
        some.truncate(torch.tensor([1, 1, 1]))
    assert snapshot(some) == before


def test_scores_where_pages_hold_none() -> None:
    some = make(PageLayout.sized(FORMAT, 4))
    key, value, keep, score, position = tokens(8, 1)
    with pytest.raises(ValueError, match="a score is given and pages of this layout hold none"):
        some.append(some.table_rows(), key, value, keep, score)
    with pytest.raises(ValueError, match="a position is given and pages of this layout hold none"):
        some.append(some.table_rows(), key, value, keep, None, position)
    with pytest.raises(ValueError, match="scores=True"):
        some.weakest(some.table_rows())
    with pytest.raises(ValueError, match="scores=True"):
        some.set_scores(some.table_rows(), score)
    given = torch.zeros(4, dtype=torch.long), score[:4], score[:4].long(), RunningMean()
    with pytest.raises(ValueError, match="scores=True"):
        some.accumulate_layers(slice(0, 1), *given)
    scored = make(PageLayout.sized(FORMAT, 4, scores=True))
    with pytest.raises(ValueError, match="positions=True"):
        scored.accumulate_layers(slice(0, 1), *given)


def test_means_of_fewer_slots_than_there_are_refused() -> None:
    some = make()
    fill(some, 5)
    given = torch.zeros(4, dtype=torch.long), torch.zeros(4, 4), torch.zeros(4, 4).long()
    with pytest.raises(ValueError, match="mass"):
        some.accumulate_layers(slice(0, 1), *given, RunningMean())


def test_shapes_are_checked_without_a_type_checker_too() -> None:
    expect_shape("x", torch.zeros(2, 3), 2, None)
    with pytest.raises(ValueError, match=r"x has the shape \(2, 3\); it must be \(any, 4\)"):
        expect_shape("x", torch.zeros(2, 3), None, 4)
    with pytest.raises(ValueError, match=r"x has the shape \(2,\); it must be \(2, any\)"):
        expect_shape("x", torch.zeros(2), 2, None)
    with pytest.raises(ValueError, match="score has the shape"):
        expect_field("score", torch.zeros(2), True, 3)
    expect_cover("keep", 3, 3)


def test_page_kernels_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = "unknown page kernels 'fast'; choose one of cpu, triton, torch"
    with pytest.raises(ValueError, match=there):
        make(kernels="fast")
    with pytest.raises(ValueError, match="unknown page kernels 'fast'"):
        declined("fast", LAYOUT, torch.device("cpu"))
    assert make(kernels="torch").kernels.__name__ == "kv_paging.torch_kernels"
    reason = "the package kv-cpu is not installed"
    absent = replace(installed_backends()["cpu"], missing=lambda: reason)
    monkeypatch.setattr("kv_paging.kernels.installed_backends", lambda: {"cpu": absent})
    assert make().kernels.__name__ == "kv_paging.torch_kernels"
    assert declined("cpu", LAYOUT, torch.device("cpu")) == reason
    with pytest.raises(ValueError, match=f"page kernels 'cpu' cannot be used here: {reason}"):
        make(kernels="cpu")


def test_a_backend_without_page_kernels_reads_what_torch_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = Backend("bare", "attends alone", lambda: None, devices=("cpu",), preferred=True)
    monkeypatch.setattr("kv_paging.kernels.installed_backends", lambda: {"bare": bare})
    assert page_kernels_of("bare") == page_kernels_of("reference") == "torch"
    assert page_kernels_of("triton") == "triton"
    assert make().kernels.__name__ == "kv_paging.torch_kernels"
    with pytest.raises(ValueError, match="'bare' cannot be used here: the backend 'bare' has none"):
        make(kernels="bare")


def test_page_kernels_registered_by_the_name_of_a_built_in_backend_are_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("triton", "reference")
    found = {
        name: Backend(name, "attends", lambda: None, page_kernels="nowhere_at_all", preferred=True)
        for name in names
    }
    monkeypatch.setattr("kv_paging.kernels.installed_backends", lambda: found)
    assert [page_kernels_of(name) for name in names] == ["triton", "torch"]
    assert make().kernels.__name__ == "kv_paging.torch_kernels"
