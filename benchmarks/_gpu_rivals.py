"""Decode steps in bfloat16 of other projects, where they are installed, beside ours in turn.

All read the same pages of 16 tokens in random order, of [page, token, head, dimension], but those
of torch, which reads keys and values in one piece. An output that differs from torch's in float32
is no yardstick. A pass that cannot be captured is timed without a graph, and its row says so.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import gpu
import torch
from _gpu_child import Report
from _gpu_decode import fits
from _gpu_tiles import chosen
from gpu import DIM, GROUP, HEADS, TOKENS, Clock, ours, step, tiers
from torch.nn.attention import SDPBackend, sdpa_kernel

NEAR: Final = 0.03
SCALE: Final = DIM**-0.5
LARGE: Final = 256  # tokens of a page as flash-attn 2 wants them
ROUNDS: Final = 11


@dataclass(frozen=True)
class Tokens:
    """Keys and values of [pages, tokens, heads, dimensions], and where sequences have theirs."""

    batch: int
    tokens: int
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor  # [batch, pages], int32
    q: torch.Tensor  # [batch, query heads, dimensions]

    @classmethod
    def drawn(cls, batch: int, tokens: int, page: int, device: str) -> "Tokens":
        """Draw them, pages in random order."""
        each = -(-tokens // page)
        shape = (batch * each, page, HEADS, DIM)
        key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(batch * each, device=device).view(batch, each).to(torch.int32)
        q = torch.randn(batch, HEADS * GROUP, DIM, device=device, dtype=torch.bfloat16)
        return cls(batch, tokens, key, value, table, q)

    @property
    def length(self) -> torch.Tensor:
        """Tokens of each sequence, int32."""
        return torch.full_like(self.table[:, 0], self.tokens)

    def right(self) -> torch.Tensor:
        """The attention of the first sequence in float32, [query heads, dimensions]."""
        pages = self.table[0].long()
        key, value = (
            x[pages].flatten(0, 1)[: self.tokens].transpose(0, 1).float()
            for x in (self.key, self.value)
        )
        q = self.q[0].view(HEADS, GROUP, DIM).float()
        weights = (q @ key.mT * SCALE).softmax(-1)
        return (weights @ value).flatten(0, 1)


Pass = Callable[[], torch.Tensor]


def _torch(backend: SDPBackend | None, *, packed: bool) -> Callable[[Tokens], Pass]:
    """Torch's own, with the queries of a group as heads or as tokens."""

    def make(given: Tokens) -> Pass:
        shape = (given.batch, -1, HEADS, DIM)
        key, value = (
            x[given.table.flatten().long()].view(shape)[:, : given.tokens].transpose(1, 2)
            for x in (given.key, given.value)
        )
        key, value = key.contiguous(), value.contiguous()
        q = given.q.view(given.batch, HEADS, GROUP, DIM) if packed else given.q[:, :, None]

        def once() -> torch.Tensor:
            found = torch.nn.functional.scaled_dot_product_attention(
                q, key, value, scale=SCALE, enable_gqa=not packed
            )
            return found.reshape(given.batch, HEADS * GROUP, DIM)

        def with_backend() -> torch.Tensor:
            assert backend is not None
            with sdpa_kernel(backend):
                return once()

        return once if backend is None else with_backend

    return make


def _flash_attn(given: Tokens) -> Pass:
    from flash_attn import flash_attn_with_kvcache

    length = given.length
    return lambda: flash_attn_with_kvcache(
        given.q[:, None],
        given.key,
        given.value,
        cache_seqlens=length,
        block_table=given.table,
        softmax_scale=SCALE,
        causal=True,
    )[:, 0]


def _flash_attn_3(given: Tokens) -> Pass:
    from flash_attn_interface import flash_attn_with_kvcache

    length = given.length

    def once() -> torch.Tensor:
        found = flash_attn_with_kvcache(
            given.q[:, None],
            given.key,
            given.value,
            cache_seqlens=length,
            page_table=given.table,
            softmax_scale=SCALE,
            causal=True,
        )
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out[:, 0]

    return once


def _flashinfer(given: Tokens) -> Pass:
    import flashinfer

    device, pages = given.q.device, given.table.shape[1]
    space = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=True)
    begins = torch.arange(given.batch + 1, dtype=torch.int32, device=device) * pages
    last = torch.full_like(given.length, (given.tokens - 1) % TOKENS + 1)
    wrapper.plan(
        begins,
        given.table.flatten(),
        last,
        HEADS * GROUP,
        HEADS,
        DIM,
        TOKENS,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        sm_scale=SCALE,
    )
    found: Pass = lambda: wrapper.run(given.q, (given.key, given.value))  # noqa: E731
    return found


def _varlen(given: Tokens, out: torch.Tensor) -> dict[str, Any]:
    """Arguments that vLLM's kernels of paged attention share: one query per sequence."""
    begins = torch.arange(given.batch + 1, dtype=torch.int32, device=given.q.device)
    return {
        "q": given.q,
        "k": given.key,
        "v": given.value,
        "out": out,
        "cu_seqlens_q": begins,
        "max_seqlen_q": 1,
        "seqused_k": given.length,
        "max_seqlen_k": given.tokens,
        "softmax_scale": SCALE,
        "causal": True,
        "block_table": given.table,
    }


def _vllm_flash(given: Tokens) -> Pass:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    out, version = torch.empty_like(given.q), get_flash_attn_version()
    arguments = _varlen(given, out)

    def once() -> torch.Tensor:
        flash_attn_varlen_func(**arguments, fa_version=version)
        return out

    return once


def _vllm_triton(given: Tokens) -> Pass:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    device, heads = given.q.device, HEADS * GROUP
    out = torch.empty_like(given.q)
    arguments = _varlen(given, out)
    segments, most = 16, 128 // HEADS  # as vLLM's backend sets them
    memory: dict[str, Any] = {}
    if given.batch <= most:
        shape = (most, heads, segments)
        memory = {
            "seq_threshold_3D": most,
            "num_par_softmax_segments": segments,
            "softmax_segm_output": torch.empty(*shape, DIM, device=device),
            "softmax_segm_max": torch.empty(shape, device=device),
            "softmax_segm_expsum": torch.empty(shape, device=device),
        }

    def once() -> torch.Tensor:
        unified_attention(
            **arguments,
            window_size=(-1, -1),
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            **memory,
        )
        return out

    return once


RIVALS: Final[Mapping[str, Callable[[Tokens], Pass]]] = {
    "torch": _torch(None, packed=False),
    "torch, packed": _torch(None, packed=True),
    "torch flash": _torch(SDPBackend.FLASH_ATTENTION, packed=False),
    "torch flash, packed": _torch(SDPBackend.FLASH_ATTENTION, packed=True),
    "torch cudnn, packed": _torch(SDPBackend.CUDNN_ATTENTION, packed=True),
    "flash-attn": _flash_attn,
    "flash-attn 3": _flash_attn_3,
    "flashinfer": _flashinfer,
    "vllm flash": _vllm_flash,
    "vllm triton": _vllm_triton,
}
MODULES: Final = {
    "flash-attn": "flash_attn",
    "flash-attn 3": "flash_attn_interface",
    "flashinfer": "flashinfer",
    "vllm flash": "vllm",
    "vllm triton": "vllm",
}
SHAPES: Final = ("64x16k", "16x64k", "1x128k")


def rival(report: Report, case: str) -> None:
    """Time one beside ours, at every shape for which there is memory and time."""
    from importlib.util import find_spec

    if case in MODULES and find_spec(MODULES[case]) is None:
        report.add("left out", case=case, why=f"{MODULES[case]} is not installed")
        return
    for name in SHAPES[:1] if report.quick else SHAPES:
        if report.left < 3 and not report.quick:
            report.add("left out", case=f"{case}, {name}", why="no time is left")
            continue
        batch, tokens = (2, 48) if report.quick else gpu.SHAPES[name]
        if fits(report, batch, tokens):
            with report.trying(f"{case}, {name}"), torch.inference_mode():
                _beside(report, case, name, batch, tokens)


def _beside(report: Report, case: str, name: str, batch: int, tokens: int) -> None:
    page = LARGE if case == "flash-attn" else TOKENS
    given = Tokens.drawn(batch, tokens, page, report.device)
    once = RIVALS[case](given)
    found, want = once()[0].float(), given.right()
    error = float((found - want).norm() / want.norm())
    q, position = step(batch, report.device)
    length = torch.full((batch, HEADS), tokens, device=report.device)
    work = {each: ours(q, position, tiers(each, length, report.device), 0) for each in ("k8v4",)}
    clock = Clock(report.device)
    with chosen():
        seconds = clock.turns({case: once, **work}, ROUNDS)
    report.add(
        "rival",
        way=case,
        shape=name,
        seconds=seconds[case],
        k8v4_seconds=seconds["k8v4"],
        graph=case not in clock.uncaptured,
        error=error,
        ok=error <= NEAR,
    )
