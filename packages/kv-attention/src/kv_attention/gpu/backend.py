"""The backend `triton` of kv-attention: kernels for GPUs, torch for unsupported passes."""

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from kv_attention.compiled import refused
from kv_attention.flash import causal, surely_causal
from kv_attention.fused import fused_kernel
from kv_attention.inputs import AttentionInputs
from kv_attention.observe import last_queries
from kv_attention.page_bounds import PageBounds
from kv_attention.page_selection import known_longest, most_read, selected
from kv_attention.partial import Partial
from kv_attention.parts import DensePart
from kv_attention.tokens import Attended
from kv_attention.torch_backend import Forward, parts_of
from kv_attention.torch_backend import attend as attend_in_torch
from kv_attention.torch_backend import attention_mass as attention_mass_in_torch
from kv_policy import Observe, PagedTokens, PageReading
from kv_policy.described import NUMBERS, described
from kv_policy.interpreter import interpreted

# Dimensions of vectors: wider tiles do not fit in shared memory together. The largest are those of
# latents, whose keys have the rotated dimensions, too.
MOST_KEY: Final = 576
MOST_VALUE: Final = 512
MOST_IN_FLOAT32: Final = 256  # products of wider tiles in float32 do not fit in registers


def declined(inputs: AttentionInputs) -> str | None:
    """Return why a pass falls back to torch; None if it does not."""
    device = inputs.q.device.type
    if device != "cuda" and not interpreted():
        return f"tensors on {device}"
    reason = refused(inputs, MOST_KEY, MOST_VALUE)
    widest = max(inputs.q.shape[4], inputs.value_dim)
    if reason is None and widest > MOST_IN_FLOAT32 and _multiplies_float32(inputs):
        return f"products in float32 of vectors of more than {MOST_IN_FLOAT32} dimensions"
    return reason


def _multiplies_float32(inputs: AttentionInputs) -> bool:
    """Whether a GPU multiplies any tokens in float32; see `arguments.computed`."""
    held = {x.dtype for tokens in inputs.dense for x in (tokens.key, tokens.value)}
    kinds = {NUMBERS.get(dtype, 0) for dtype in (inputs.q.dtype, *held)}
    for part in inputs.pages:
        formats = described(part.layout).formats
        kinds |= {formats[0], formats[4]}
    mixed = NUMBERS[torch.bfloat16] in kinds and inputs.q.dtype != torch.bfloat16
    return mixed or NUMBERS[torch.float32] in kinds


def attend(inputs: AttentionInputs) -> Attended:
    """Compute attention over all parts, by kernels if `declined` returns None.

    Logits and sums are in float32; products are in float16 or bfloat16 if queries and tokens are,
    for which codes are exact. A decode step does not synchronize with the device, except to find
    the longest table row if it is observed and `longest` is None.
    """
    if declined(inputs) is not None:
        return attend_in_torch(inputs)
    return _attend(inputs)


def _attend(inputs: AttentionInputs) -> Attended:
    # A late import: only this function needs triton.
    from kv_attention.gpu.arguments import dense_part, paged_part
    from kv_attention.gpu.attention_mass import mass_of_pass, mass_of_step
    from kv_attention.gpu.decode import decode
    from kv_attention.gpu.prefill import attend_to_all
    from kv_attention.gpu.tuning import machine_of

    q, position, scale = inputs.q, inputs.position, inputs.scale
    softcap, sinks = inputs.softcap, inputs.sinks
    watched, machine = inputs.observed, machine_of(q.device)
    parts = [
        *(paged_part(part, watched=watched) for part in inputs.pages),
        *(dense_part(tokens) for tokens in inputs.dense),
    ]
    places = [*inputs.page_positions, *(tokens.position[:, None] for tokens in inputs.dense)]
    if q.shape[3] == 1:
        step = decode(
            q,
            position,
            parts,
            inputs.value_dim,
            scale,
            machine,
            softcap,
            sinks,
            inputs.out,
            watched=watched,
        )
        out, lse = step.out, step.lse[..., None]
    else:
        chunk = _causal_chunk(inputs)
        left = parts if chunk is None else parts[:-1]
        options = softcap, sinks, chunk
        found = attend_to_all(q, position, left, inputs.value_dim, scale, machine, *options)
        out, lse = found.out, found.lse

    def seen(what: Observe) -> Attended:
        if what.last == 0:
            return Attended(out)
        if what.gumbel is not None:  # the noise is computed in torch
            return attention_mass_in_torch(Forward(inputs, parts_of(inputs), out, lse), what)
        if q.shape[3] == 1:
            return mass_of_step(step, position, parts, places, what)
        rows, at, some = last_queries(q, position, lse, what.last)
        return mass_of_pass(rows, at, some, out, parts, places, scale, machine, what, softcap)

    return Attended.of(seen(what) for what in inputs.observations)


def select_pages(
    q: Float[Tensor, "B H G D"], pages: PagedTokens, bounds: PageBounds, reading: PageReading
) -> PagedTokens:
    """Select as `kv_attention.select_pages`, without synchronizing with the device.

    Torch selects if `selection_declined` returns a reason.
    """
    if selection_declined(q, bounds) is not None:
        return selected(q, pages, bounds, reading, waits=False)
    longest, tokens = known_longest(pages), pages.layout.tokens
    most = most_read(reading, longest, tokens, bounds.missing)
    if most is None:
        return pages
    # A late import, as above.
    from kv_attention.gpu.selecting import select

    return select(q, pages, bounds, reading, most)


def selection_declined(q: Float[Tensor, "B H G D"], bounds: PageBounds) -> str | None:
    """Return why torch selects the pages instead of kernels; None if kernels do."""
    if q.device.type != "cuda" and not interpreted():
        return f"tensors on {q.device.type}"
    if q.dtype not in NUMBERS or bounds.both.dtype not in (torch.bfloat16, torch.uint8):
        return f"queries in {q.dtype}, bounds in {bounds.both.dtype}"
    if q.shape[3] > MOST_KEY:
        return f"keys of more than {MOST_KEY} dimensions"
    return None


def _causal_chunk(inputs: AttentionInputs) -> Partial | None:
    """Return the attention of a prompt's chunk to itself, if a fused kernel of torch takes it.

    `attend_to_all` merges stored tokens with it. Whether a chunk with padding is causal would have
    to be read from the device.
    """
    if not inputs.dense or inputs.softcap is not None:
        return None
    q, last = inputs.q, inputs.dense[-1]
    if not surely_causal(inputs.position, last):
        return None
    if fused_kernel(q, last.key, last.value, masked=False) is None:
        return None
    return causal(q, DensePart.of(last, inputs.sum_dtype), inputs.scale)
