"""A reference of the decode step on an engine's rows, by that of attention."""

import itertools

import torch

import native_judge
from kv_policy.described import NUMBERS
from native_judge import (
    MOST,
    NEAR,
    PART,
    at,
    attention,
    each_of,
    formats_of,
    held,
    observed,
    page_place,
    span,
    unknown,
)
from native_maps import bases_of, multiplied, stored_rows


def decode_rows(
    q, key, value, position, out, first, tensors, numbers, watches, above, running, groups,
    scale, softcap, sinks, store, tier, copies, maps, kinds, isa,
):  # fmt: skip
    """Return bounds of the output, of all its rows, then those of what is observed."""
    sequences, heads = len(position), key.shape[1]
    at(range(len(out) + 1), first + sequences)
    bases = bases_of(maps, kinds, heads)
    q = multiplied(q, bases.get(1)).to(q.dtype)
    key, value = stored_rows(key, value, bases)
    if store:
        page_place(store[0], tier, *store[1:], key, value, isa)
    rows = slice(first, first + sequences)
    new = [x[rows].unsqueeze(2) for x in (key, value)]
    for copy, x in zip(copies, new, strict=bool(copies)):
        copy.copy_(x.squeeze(2))
    by_head = q[rows].unflatten(1, (heads, -1)).unsqueeze(3)
    parts, described = with_new(tensors, numbers, new, position)
    given = (by_head, position, parts, described, value.shape[-1], scale, softcap, sinks)
    if groups:
        if above or running or store:
            raise IndexError("heads are in groups")
        found = by_group(groups, new, *given[:3], numbers, *given[4:])
    else:
        found, lse, table_rows = attention(*given)
    whole = out.double()
    whole[rows] = multiplied(found.flatten(1, 3), bases.get(3)).view(sequences, *out.shape[1:])
    near = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(out.dtype, NEAR)
    result = [unknown(whole, near)]
    if not above:
        return result
    last = [1] * len(above)
    more = (lse, table_rows, described, watches, above, last)
    bounds = observed(by_head, position, *more)
    if not running:
        return result + bounds
    if len(bounds) != len(running) or len(watches) != 4 or watches[1] > 1:
        raise IndexError("running")
    for i, part in enumerate(each_of(numbers, PART)):
        of = tensors[4 * i : 4 * i + 4], part, running[2 * i + 2 :][:2]
        renew(*of, position, bounds[2 * i].low[0], *running[:2])
    return result + bounds[-2:]


def with_new(tensors, numbers, new, position):
    """Return the tensors and numbers of parts, with the new tokens as the last."""
    kinds = [(NUMBERS[x.dtype], x.shape[-1], 0, 1) for x in new]
    described = [*numbers, 0, 1, *kinds[0], *kinds[1], 1, *[0] * 7, 1, 1]
    return [*tensors, *new, position, position], described


def by_group(groups, new, q, position, tensors, numbers, value_dim, scale, softcap, sinks):
    """Return the output of heads in groups, each with parts and dimensions of its own."""
    found = torch.zeros(*q.shape[:-1], value_dim).double()
    rest, each, named = list(groups), each_of(numbers, PART), []
    tensors = tensors[: 4 * len(each)]
    while rest:
        count, key_dim, value_dim_of, parts = (at(rest, i) for i in range(4))
        heads, rest = rest[4 : 4 + count], rest[4 + count :]
        at(range(1, MOST), count - 1), at(range(q.shape[-1]), key_dim - 1)
        at(range(value_dim), value_dim_of - 1), at(range(len(each) + 1), parts)
        if len(heads) < count or len(tensors) < 4 * parts or any(not p[0] for p in each[:parts]):
            raise IndexError("a group of heads")
        named += [at(range(q.shape[1]), head) for head in heads]
        own = [number for part in each[:parts] for number in part]
        mine = new[0][:, heads, :, :key_dim], new[1][:, heads, :, :value_dim_of]
        given = with_new(tensors[: 4 * parts], own, mine, position)
        tensors, each = tensors[4 * parts :], each[parts:]
        some = [x[heads] for x in sinks]
        options = (value_dim_of, scale, softcap, some)
        found[:, heads, ..., :value_dim_of] = attention(
            q[:, heads, ..., :key_dim], position, *given, *options
        )[0]
    if sorted(named) != list(range(q.shape[1])) or each:
        raise IndexError("groups of heads")
    return found


def renew(tensors, numbers, offsets, position, mass, last, over):
    """Update the scores of a part's tokens in its pages; unknown ones are NaN."""
    data, table, _, place = tensors
    tokens, reverse = numbers[11], numbers[17]
    apart_from_scores(numbers, offsets)
    for b, h in itertools.product(*map(range, mass.shape[:2])):
        query = int(position[b])
        if query < 0:
            continue
        row = table[b, h].flip(0) if reverse else table[b, h]
        for slot in held(tensors, numbers, b, h).slot:
            page, inside = data[at(row, slot // tokens)], slot % tokens
            where = int(place[b, h, slot])
            if offsets[1] >= 0:
                where = int(span(page, offsets[1], inside, 4).clone().view(torch.int32))
            if where < 0:
                continue
            score = span(page, offsets[0], inside, 4)
            old, given = score.clone().view(torch.float32).double(), mass[b, h, slot]
            past = max(0, min(query - 1 - where, last if last >= 0 else 2**31))
            new = old + given / over if over > 0 else (old * past + given) / (past + 1)
            score.copy_(new.float().view(torch.uint8))


def apart_from_scores(numbers, offsets) -> None:
    """Raise if scores share bytes with another field of a page."""
    tokens, *places = numbers[11:17]
    fields = [(place, 4 * tokens) for place in (places[4], offsets[1]) if place >= 0]
    for form, share, i in zip(formats_of(numbers, PART), numbers[18:20], (0, 2), strict=True):
        fields.append((places[i], form.bytes * tokens))
        fields.append((places[i + 1], form.meta * (tokens // share)))
    for first, size in fields:
        if size and offsets[0] < first + size and first < offsets[0] + 4 * tokens:
            raise IndexError(f"scores at {offsets[0]}, another field at {first}")


def settle_scores(args, copies) -> None:
    """Set updated scores that are near those of the reference, or unknown, to these."""
    tensors, numbers, running = args[6], args[7], args[10]
    if not running:
        return
    for i, part in enumerate(each_of(numbers, PART)):
        mine, theirs, tokens = tensors[4 * i], copies[6][4 * i], part[11]
        at = slice(running[2 * i + 2], running[2 * i + 2] + 4 * tokens)
        x, y = (each[:, at].clone().view(torch.float32) for each in (mine, theirs))
        near = (x - y).abs() <= NEAR * (1 + y.abs())
        mine[:, at] = y.where(near | y.isnan(), x).view(torch.uint8)


def reference_of(name):
    """Return the reference of an operator."""
    return decode_rows if name == "decode_rows" else getattr(native_judge, name)
