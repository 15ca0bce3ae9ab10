"""Torch's fused kernels for GPUs: what they are given, and the use of their results.

The kernels are emulated on the CPU with the conditions of those in torch, and with their layouts.
"""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from attention_judge import assert_same_observation, assert_same_output
from kv_attention import parts
from kv_attention.flash import is_causal
from kv_attention.fused import attend_fused, kernels_on_cuda
from kv_attention.parts import DensePart
from kv_policy import Observe

HALF, BF16, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "dims", "masked", "expected"),
    [
        (BF16, (128, 128), False, ("flash", "efficient")),
        (HALF, (256, 256), False, ("flash", "efficient")),
        (HALF, (264, 264), False, ("efficient",)),
        (BF16, (192, 128), False, ("efficient",)),
        (BF16, (128, 128), True, ("efficient",)),
        (SINGLE, (64, 64), False, ("efficient",)),
        (SINGLE, (4, 12), True, ("efficient",)),
        (BF16, (4, 4), False, ()),
        (SINGLE, (6, 8), False, ()),
        (HALF, (8, 12), False, ()),
        (torch.float64, (64, 64), False, ()),
    ],
)
def test_what_kernels_take(dtype, dims, masked, expected):
    assert kernels_on_cuda(dtype, dims, masked=masked) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kernel", "dtype", "hidden"),
    [("flash", BF16, False), ("efficient", BF16, True), ("efficient", SINGLE, False)],
)
def test_shapes_by_torch_itself(kernel, dtype, hidden, causal):
    """The kernels' own description: the log-sum-exp may have more queries."""
    q = torch.empty(2, 3, 4, 33, 64, dtype=dtype, device="meta")
    key = torch.empty(6, 33, 64, dtype=dtype, device="meta")
    mask = torch.zeros(6, 33, dtype=torch.bool, device="meta") if hidden else None
    found = attend_fused(kernel, q, key, key, mask, 0.1, causal=causal)
    assert (found.out.shape, found.out.dtype) == (q.shape, dtype)
    assert (found.lse.shape, found.lse.dtype) == (q.shape[:-1], SINGLE)


def attention(q, key, value, bias, causal, scale):
    """Return the output as kernels lay it out, by query and head, and the log-sum-exp."""
    logits = scale * q.double() @ key.double().mT
    if bias is not None:
        logits += bias
    if causal:
        logits.masked_fill_(torch.ones_like(logits).triu(1).bool(), -torch.inf)
    lse = logits.logsumexp(-1)
    none = lse == -torch.inf  # as in torch, 0 for a query that sees no key
    out = logits.softmax(-1).masked_fill(none[..., None], 0) @ value.double()
    out = out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return out, lse.masked_fill(none, 0).float()


def check_vectors(*tensors):
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert not any(stride * x.itemsize % 16 for stride in x.stride()[:-1])


def flash(q, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    assert q.dtype in (HALF, BF16)
    assert q.shape[-1] == value.shape[-1] <= 256
    assert q.shape[2] == key.shape[2] or not is_causal
    check_vectors(q, key, value)
    return (*attention(q, key, value, None, is_causal, scale), *[None] * 7)


def efficient(
    q, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert compute_log_sumexp
    check_vectors(q, key, value)
    if attn_bias is not None:
        assert attn_bias.dtype == q.dtype
        assert attn_bias.shape == (*q.shape[:3], key.shape[2])
        check_vectors(attn_bias)
    out, lse = attention(q, key, value, attn_bias, is_causal, scale)
    length = q.shape[2]
    return out, torch.nn.functional.pad(lse, (0, -length % 32), value=torch.inf), None, None


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Choose kernels as on a GPU; return the names of those that are used."""
    used = []

    def chosen(q, key, value, *, masked):
        if not q.dtype == key.dtype == value.dtype:
            return None
        if not q.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
            return None
        return next(
            iter(kernels_on_cuda(q.dtype, (q.shape[-1], value.shape[-1]), masked=masked)), None
        )

    def noted(kernel):
        def run(*given, **named):
            used.append(kernel.__name__)
            return kernel(*given, **named)

        return run

    monkeypatch.setattr("kv_attention.flash.fused_kernel", chosen)
    monkeypatch.setattr("kv_attention.gpu.backend.fused_kernel", chosen)
    monkeypatch.setattr("kv_attention.flash.is_worth_it", lambda q, value_dim: False)
    kernels = SimpleNamespace(
        _scaled_dot_product_flash_attention=noted(flash),
        _scaled_dot_product_efficient_attention=noted(efficient),
    )
    monkeypatch.setattr("kv_attention.fused._ATEN", kernels)
    return used


SHAPES = {
    "halves": {"dtype": HALF, "D": 8, "Dv": 8},
    "bfloat16": {"dtype": BF16, "D": 16, "Dv": 16, "sinks": True},
    "float32": {"dtype": SINGLE, "D": 8, "Dv": 8},
    "other values": {"dtype": BF16, "D": 24, "Dv": 16},
    "none": {"dtype": SINGLE, "D": 5, "Dv": 5},
}


@pytest.mark.parametrize("padding", ["none", "left", "right", "all"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chunks_in_torch(case, on_a_gpu, shape, padding):
    for window in (0, 9):  # tokens with holes, which all queries see
        c = case(3, B=2, L=37, G=3, window=window, padding=padding, **shape)
        assert_same_output(c)
        assert_same_observation(c, Observe(4, "max"), error=2e-2)
    first = "flash" if shape["dtype"] != SINGLE and shape["D"] == shape["Dv"] else "efficient"
    if shape["D"] == 5:
        assert not on_a_gpu
    elif padding == "none":
        assert {first, "efficient"} == set(on_a_gpu)
    else:
        assert set(on_a_gpu) == {"efficient"}


def test_vectors_at_odd_addresses_are_copied(case, on_a_gpu):
    c = case(3, B=1, L=20, D=9, Dv=9, tiers=[], dtype=BF16)
    dense = c.dense[0]
    odd = type(dense)(dense.key[..., 1:], dense.value[..., 1:], dense.position)
    assert_same_output(type(c)(c.q[..., 1:], c.position, [], [odd], []))
    assert on_a_gpu == ["flash"]


def test_whether_a_chunk_is_causal_is_not_read_where_it_is_known(case):
    c = case(3, L=9, D=8, Dv=8, tiers=[])
    part = DensePart.of(c.dense[0], SINGLE)
    with patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("the host waited")):
        assert is_causal(c.q, c.dense[0].position, part)
        with pytest.raises(AssertionError, match="waited"):
            is_causal(c.q, c.position.clone(), part)


@pytest.mark.parametrize(
    "shape",
    [
        {"tiers": []},
        {"tiers": [("8", "4"), ("4", "2")], "window": 3},
        {"tiers": [("8", "4")], "sinks": True},
        {"tiers": [], "sinks": True},
    ],
)
@pytest.mark.parametrize("dtype", [SINGLE, BF16])
def test_chunks_in_triton(case, on_a_gpu, shape, dtype):
    """The chunk is computed by a kernel of torch, and merged with stored tokens by kernels."""
    c = case(5, L=11, D=8, Dv=8, stored=20, known=True, dtype=dtype, **shape)
    assert_same_output(c, "triton")
    assert on_a_gpu == ["flash" if dtype == BF16 else "efficient"]
    assert_same_observation(c, Observe(4, "max"), error=2e-2, backend="triton")


def test_a_chunk_with_a_bound_or_padding_is_computed_in_triton(case, on_a_gpu):
    for given in ({"softcap": 1.5}, {"padding": "left"}):
        c = case(5, L=6, D=8, Dv=8, stored=9, known=True, dtype=BF16, **given)
        assert_same_output(c, "triton")
    assert on_a_gpu == []


def test_temporaries_are_a_share_of_the_memory_of_a_gpu():
    card = SimpleNamespace(total_memory=80 << 30)
    with patch("torch.cuda.get_device_properties", lambda device: card):
        assert 4 * parts.room(torch.device("cuda", 1)) == 160 << 20
    assert parts.room(torch.device("cpu")) == parts.ROOM
