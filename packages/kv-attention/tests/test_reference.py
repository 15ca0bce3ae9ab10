"""The reference, compared with a textbook loop over numbers, and with torch's attention."""

import math

import pytest
import torch

from kv_attention import DenseTokens, attend
from kv_policy import Observe


def tokens_of(case, b, h, at):
    """Return all tokens that a query of one table row sees: (part, slot), key, value."""
    for n, part in enumerate(case.pages):
        layout = part.layout
        form, split = layout.format, len(layout.format.key.parts)
        for slot in range(int(part.length[b, h])):
            page = part.data[part.table[b, h, slot // layout.tokens]]
            row, within = divmod(slot % layout.tokens, form.block)
            pieces = [page[o : o + n * size].view(n, size)[row] for o, n, size in layout.segments]
            key = form.key.decode(torch.cat(pieces[:split])[None])[0, within]
            value = form.value.decode(torch.cat(pieces[split:])[None])[0, within]
            yield (n, slot), key.tolist(), value.tolist()
    for n, part in enumerate(case.dense, start=len(case.pages)):
        for slot, place in enumerate(part.position[b].tolist()):
            if 0 <= place <= at:
                yield (n, slot), part.key[b, h, slot].tolist(), part.value[b, h, slot].tolist()


def textbook(case, b, h, g, i):
    """Return one query's output and the probability of each token, in Python numbers."""
    at = int(case.position[b, i])
    query = case.q[b, h, g, i].tolist()
    out, weights = [0.0] * case.dense[0].value.shape[-1], {}
    tokens = list(tokens_of(case, b, h, at)) if at >= 0 else []
    for owner, key, _ in tokens:
        dot = sum(x * y for x, y in zip(query, key, strict=True))
        weights[owner] = math.exp(case.scale * dot)
    p = {owner: weight / sum(weights.values()) for owner, weight in weights.items()}
    for owner, _, value in tokens:
        out = [x + p[owner] * y for x, y in zip(out, value, strict=True)]
    return out, p


@pytest.mark.parametrize("padding", ["none", "left", "right", "all"])
@pytest.mark.parametrize("block", [1, 2])
def test_reference_is_the_textbook_loop(case, padding, block):
    tiers = [("8", "4"), ("float32", "float32")] if block == 1 else [("shared", "shared")]
    shape = {"stored": 7, "window": 3, "group": 3, "Dv": 4, "block": block}
    c = case(1, tiers=tiers, padding=padding, dtype=torch.float64, **shape)
    got = attend(
        c.q, c.position, c.pages, c.dense, c.scale, Observe(None, "sum"), backend="reference"
    )
    mass = [torch.zeros_like(m) for m in got.mass]
    for b, h, g, i in torch.cartesian_prod(*map(torch.arange, c.q.shape[:4])).tolist():
        out, p = textbook(c, b, h, g, i)
        expected = torch.tensor(out, dtype=torch.float64)
        torch.testing.assert_close(got.out[b, h, g, i], expected, rtol=1e-12, atol=1e-12)
        for (n, slot), share in p.items():
            mass[n][b, h, slot] += share
    for m, expected in zip(got.mass, mass, strict=True):
        torch.testing.assert_close(m, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_raw_pages_with_nothing_dropped_are_plain_attention(case, backend):
    raw = ("float64", "float64")
    c = case(2, tiers=(raw, raw), stored=17, ragged=False, L=9, G=3, D=8, Dv=8, dtype=torch.float64)
    got = attend(c.q, c.position, c.pages, c.dense, c.scale, backend=backend)
    keys, values = [], []
    for part in c.pages:
        pages = part.data[part.table[..., :-1].long()]  # [B H T nbytes]; the last entry is stale
        (start, rows, size), (begin, _, _) = part.layout.segments
        for found, offset in ((keys, start), (values, begin)):
            rowed = pages[..., offset : offset + rows * size].contiguous().view(torch.float64)
            found.append(rowed.view(2, 2, -1, 8)[:, :, :17])
    key = torch.cat([*keys, c.dense[0].key], dim=2).repeat_interleave(3, dim=1)
    value = torch.cat([*values, c.dense[0].value], dim=2).repeat_interleave(3, dim=1)
    mask = torch.ones(9, 34 + 9, dtype=torch.bool).tril(34)
    expected = torch.nn.functional.scaled_dot_product_attention(
        c.q.flatten(1, 2), key, value, attn_mask=mask, scale=c.scale
    )
    torch.testing.assert_close(got.out.flatten(1, 2), expected, rtol=1e-13, atol=1e-14)


def test_results_come_in_the_dtype_of_the_queries(case):
    c = case(3, dtype=torch.bfloat16)
    got = attend(c.q, c.position, c.pages, c.dense, 1.0, Observe(None), backend="reference")
    assert got.out.dtype == torch.bfloat16
    assert {m.dtype for m in got.mass} == {torch.float32}
    assert {s.dtype for s in got.seen} == {torch.int32}


def test_no_parts_at_all_give_zeros(case):
    c = case(4)
    for backend in ("reference", "torch"):
        got = attend(c.q, c.position, [], [], 1.0, Observe(None), backend=backend)
        assert torch.equal(got.out, torch.zeros_like(c.q))
        assert got.mass == got.seen == ()


def test_a_future_token_has_no_say_in_the_reference():
    k = torch.eye(3, dtype=torch.float64)[None, None]
    place = torch.tensor([[0, 1, 2]])
    q = torch.zeros(1, 1, 1, 3, 3, dtype=torch.float64)
    got = attend(q, place, [], [DenseTokens(k, k, place)], 1.0, backend="reference")
    expected = torch.tensor([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    torch.testing.assert_close(got.out[0, 0, 0], expected.double(), rtol=1e-7, atol=1e-7)
