"""Direct calls of native operators: invalid arguments raise, without out-of-bounds access.

`KV_CPU_FUZZ=50000:7` runs that many calls with that seed; see `native_fuzz.py`.
"""

import os
import struct
from random import Random

import pytest
import torch

import native_rows
from kv_cpu import missing, runnable
from kv_policy.described import LEVELS
from native_calls import Call, Maker
from native_fuzz import call_of, fuzz, mapped

CALLS, SEED = 500, 0


def test_random_calls_give_what_they_should_or_are_refused():
    calls, _, seed = os.environ.get("KV_CPU_FUZZ", f"{CALLS}:{SEED}").partition(":")
    faults, done = fuzz(int(seed or SEED), int(calls))
    assert not faults, "\n".join(str(fault) for fault in faults)
    assert done["calls"] == int(calls)
    assert done["refused"] >= int(calls) // 4  # most calls are modified, and
    assert done["calls"] - done["refused"] >= int(calls) // 8  # some are not


class Even(Maker):
    """Draws calls whose codes stand for themselves: their numbers have fixed places."""

    def format(self, dim):
        while (found := super().format(dim))[0] == LEVELS:
            pass
        return found


def valid(name):
    """Return an unmodified call of an operator, with tokens, pages first in attention."""
    assert missing() is None
    makers = (Even(Random(i), runnable()) for i in range(1000))
    return next(call for maker in makers if (call := Call(name, getattr(maker, name)())).full)


PARTS = {"decode": 3, "prompt": 3, "attention_mass": 4}  # index of the numbers of parts
FIRST = {  # of the first part, which is paged
    "tokens": (
        11,
        2**61,
        "tokens of a page of part 0 is 2305843009213693952; it must be 1 to 2147483647",
    ),
    "offset": (12, 2**63 - 8, "offset of keys of part 0 is 9223372036854775800; .* do not fit"),
    "before": (12, -4, "offset of keys of part 0 is -4; .* from there on do not fit"),
    "width": (1, -1, "width of part 0 is -1; it must be 0 to 2147483647"),
    "kind": (2, 7, "keys of part 0 are of kind 7; it must be 0, codes, 1 to 3, plain numbers, or"),
    "dim": (3, 0, "keys of part 0 have 0 dimensions; 1 to 1024 are supported"),
}


def expect_refusal(name, changed, message, levels=()):
    """Call with other numbers of the first part, by place, and the levels of its codes."""
    call = valid(name)
    numbers = call.args[PARTS[name]]
    for place, number in changed.items():
        numbers[place] = number
    numbers[20:20] = bits_of(levels)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        getattr(torch.ops.kv_cpu, name)(*call.args)


def bits_of(levels):
    return list(struct.unpack(f"={len(levels)}q", struct.pack(f"={len(levels)}d", *levels)))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("what", FIRST)
def test_numbers_of_a_part_are_refused_by_name(name, what):
    place, number, message = FIRST[what]
    expect_refusal(name, {place: number}, message)


@pytest.mark.parametrize(("bits", "group", "message"), [
    (0, 4, "keys of part 0 are codes of 0 bits; 1, 2, 3, 4 and 8 are supported"),
    (5, 4, "keys of part 0 are codes of 5 bits; 1, 2, 3, 4 and 8 are supported"),
    (4, 0, "keys of part 0 have a scale for 0 dimensions; it must be 1 or more"),
    (4, -1, "keys of part 0 have a scale for -1 dimensions; it must be 1 or more"),
])  # fmt: skip
@pytest.mark.parametrize("name", PARTS)
def test_codes_that_there_are_not_are_refused(name, bits, group, message):
    expect_refusal(name, {2: 0, 4: bits, 5: group}, message)


LEVELS_OF_2_BITS = [-2.0, -1.0, 0.5, 3.0]


@pytest.mark.parametrize(("bits", "group", "levels", "message"), [
    (0, 1024, [], "keys of part 0 are levels of 0 bits; 1 to 4 are supported"),
    (8, 1024, [], "keys of part 0 are levels of 8 bits; 1 to 4 are supported"),
    (2, 0, LEVELS_OF_2_BITS, "keys of part 0 have a scale for 0 dimensions; it must be 1 or more"),
    (2, 1, LEVELS_OF_2_BITS, "keys of part 0 are levels with a scale for 1 of .* dimensions; it"),
    (2, 1024, LEVELS_OF_2_BITS[:3], "parts are .* numbers and .* tensors; each needs 20 numbers, "),
    (2, 1024, [*LEVELS_OF_2_BITS, 4.0], "parts are .* numbers and .* tensors; each needs 20 num"),
    (2, 1024, [-2.0, -1.0, -1.0, 3.0], "keys of part 0 have level -1 after -1; levels must be asc"),
    (2, 1024, [-2.0, -1.0, 0.5, float("nan")], "keys of part 0 have level nan after 0.5; levels"),
    (2, 1024, [float("-inf"), -1.0, 0.5, 1.0], r"keys of part 0 have level -inf after -1.7\S*; le"),
])  # fmt: skip
@pytest.mark.parametrize("name", PARTS)
def test_levels_that_codes_cannot_have_are_refused(name, bits, group, levels, message):
    dim = max(valid(name).args[PARTS[name]][3], 2)
    expect_refusal(name, {2: LEVELS, 3: dim, 4: bits, 5: group}, message, levels)


@pytest.mark.parametrize("name", PARTS)
def test_tokens_do_not_share_scales_of_levels(name):
    message = "keys of part 0 share .* must be 1, as codes are levels"
    expect_refusal(name, {2: LEVELS, 4: 2, 5: 1024, 18: 2}, message, LEVELS_OF_2_BITS)


@pytest.mark.parametrize("name", PARTS)
def test_tokens_that_cannot_share_scales_are_refused(name):
    call = valid(name)
    numbers = call.args[PARTS[name]]
    numbers[2], numbers[4], numbers[5] = 0, 1, 1
    for share, message in (
        (0, "keys of part 0 share scales with 0 tokens; it must be 1 or more"),
        (2**31, "keys of part 0 share scales with 2147483648 tokens; it must be 1 or more"),
        (
            numbers[11] + 1,
            "offset of scales of keys of part 0: they are shared by .* must be a multiple",
        ),
    ):
        numbers[18] = share
        with pytest.raises(RuntimeError, match=f"^{message}"):
            getattr(torch.ops.kv_cpu, name)(*call.args)
    numbers[2], numbers[18] = 1, 2
    with pytest.raises(RuntimeError, match=r"^keys of part 0 share .* must be 1, as they have"):
        getattr(torch.ops.kv_cpu, name)(*call.args)


@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("name", [*PARTS, "decode_rows"])
def test_tables_of_padding_are_not_read(name, page):
    args = valid(name).args
    at, part = (3, 6) if name == "decode_rows" else (1, PARTS[name] - 1)
    args[at][:] = 45
    args[part][1][-1], args[part][2][-1] = page, 1
    if name == "attention_mass":
        args[7] = [1 for _ in args[7]]
    with pytest.raises(RuntimeError, match=f"page {page}"):
        getattr(torch.ops.kv_cpu, name)(*args)
    args[at][-1] = -1
    copies = mapped(args, torch.clone)
    expected = native_rows.reference_of(name)(*copies)
    found = getattr(torch.ops.kv_cpu, name)(*args)
    found = [args[4], *found] if name == "decode_rows" else found
    assert len(found) == len(expected)
    assert all(bounds.hold(x) for bounds, x in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("which", "argument"), [(0, "page data"), (1, "table"), (2, "lengths")])
def test_tensors_of_a_part_are_refused_by_name(name, which, argument):
    call = valid(name)
    tensors = call.args[PARTS[name] - 1]
    given = tensors[which]
    wrong = [(given.double(), "float64"), (given[None], r"\[1, ")]
    for tensor, reason in wrong:
        tensors[which] = tensor
        with pytest.raises(RuntimeError, match=f"^{argument} of part 0 is .*{reason}.*it must be"):
            getattr(torch.ops.kv_cpu, name)(*call.args)


def test_group_0_and_negative_numbers_of_queries_are_refused():
    for name in PARTS:
        call = valid(name)
        call.args[0] = call.args[0][:, :, :0]
        with pytest.raises(RuntimeError, match=r"^queries of a KV head is 0; it must be 1 to 4096"):
            getattr(torch.ops.kv_cpu, name)(*call.args)
    call = valid("attention_mass")
    call.args[7] = [-1] * len(call.args[7])
    with pytest.raises(RuntimeError, match=r"^a number of last queries is -1; it must be 0 to"):
        torch.ops.kv_cpu.attention_mass(*call.args)


TIER = {
    "tokens": (0, 2**61, "tokens of a page is 2305843009213693952; it must be 1 to"),
    "offset": (1, 2**63 - 8, "offset of keys is 9223372036854775800; .* do not fit"),
    "scores": (5, 2**63 - 8, "offset of scores is 9223372036854775800; it must be -1 to"),
    "dim": (13, 1025, "values have 1025 dimensions; 1 to 1024 are supported"),
    "both": (3, None, "offset of values is .* the page has another field"),
}
PAGES = (
    "page_read",
    "page_weakest",
    "page_rescore",
    "page_accumulate",
    "page_write",
    "page_recode",
)


@pytest.mark.parametrize("name", [*PAGES, "page_compact", "page_step"])
@pytest.mark.parametrize("what", TIER)
def test_numbers_of_a_tier_are_refused_by_name(name, what):
    call = valid(name)
    numbers = call.args[5][1:17] if name == "page_step" else call.args[2]
    place, number, message = TIER[what]
    numbers[place] = numbers[1] if number is None else number
    if name == "page_step":
        call.args[5][1:17] = numbers
    before = call.args[0].clone()
    with pytest.raises(RuntimeError, match=f"^{message}"):
        getattr(torch.ops.kv_cpu, name)(*call.args)
    assert torch.equal(before, call.args[0])


@pytest.mark.parametrize("field", ["keys", "values", "positions", "positions to update with"])
def test_scores_share_no_bytes_with_another_field(field):
    makers = (Maker(Random(i), runnable()) for i in range(1000))
    drawn = (maker.decode_rows() for maker in makers)
    args = next(args for args in drawn if args[10] and args[10][3] >= 0)
    numbers, running = args[7], args[10]
    if field == "keys":
        running[2] = numbers[12]
    elif field == "values":
        running[2] = numbers[14]
    elif field == "positions":
        numbers[16] = running[2]
    else:
        running[2] = running[3]
    before = args[6][0].clone()
    message = rf"^offset of scores of part 0 is {running[2]}, up to .* the page has another field"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.kv_cpu.decode_rows(*args)
    assert torch.equal(before, args[6][0])


def test_memory_that_is_written_is_shared_with_nothing():
    call = valid("page_rescore")
    data, table = call.args[:2]
    apart = torch.zeros(data.numel() + table.numel() * 8, dtype=torch.uint8)
    inside = apart[: table.numel() * table.element_size()].view(table.dtype).view(table.shape)
    call.args[:2] = [apart[: data.numel()].view(data.shape), inside]
    with pytest.raises(
        RuntimeError, match=r"^page data is written to and shares memory with table"
    ):
        torch.ops.kv_cpu.page_rescore(*call.args)


def test_memory_that_was_given_back_is_refused():
    call = valid("page_read")
    call.args[0].untyped_storage().resize_(8)
    with pytest.raises(
        RuntimeError, match=r"^page data reaches to byte .* of its storage, .* has 8"
    ):
        torch.ops.kv_cpu.page_read(*call.args)


def test_a_shared_copy_is_left_alone():
    call = valid("page_copy")
    call.args[1], call.args[2] = torch.tensor([0]), torch.tensor([1])
    first = call.args[0]
    before = first.clone()
    call.args[0] = torch._lazy_clone(first)
    torch.ops.kv_cpu.page_copy(*call.args)
    assert torch.equal(first, before)
    assert torch.equal(call.args[0][1], before[0])


def test_every_instruction_set_is_called():
    found = {call_of(0, i).args[-1] for i in range(CALLS)}
    assert set(runnable()) <= {arg for arg in found if isinstance(arg, str)}


def test_a_bound_of_logits_and_sinks_that_do_not_fit_are_refused():
    for name in ("decode", "prompt"):
        for softcap in (-1.0, 1e-40, 1e40, float("nan"), float("inf")):
            call = valid(name)
            call.args[-3] = softcap
            with pytest.raises(RuntimeError, match=r"^softcap is .*; it must be 0, or 1e-30 to 1e"):
                getattr(torch.ops.kv_cpu, name)(*call.args)
        call = valid(name)
        heads, group = call.args[0].shape[1:3]
        call.args[-2] = [torch.zeros(heads, group + 1)]
        with pytest.raises(RuntimeError, match=r"^sinks is float32 .* it must be float32"):
            getattr(torch.ops.kv_cpu, name)(*call.args)
        call.args[-2] = [torch.zeros(heads, group)] * 2
        with pytest.raises(RuntimeError, match=r"^sinks are 2 tensors; give one, or none"):
            getattr(torch.ops.kv_cpu, name)(*call.args)
