"""Numbers as bits: device-independent rounding, and byte fields of pages."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def as_float(x):
    """Convert float32, float16 or bfloat16 to float32, exactly."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
@no_type_check
def half_bits(x):
    """Return the bits of a float32 rounded to float16, ties to even; only the low 16 are valid."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
@no_type_check
def from_half(bits):
    """Return the float32 of a float16's bits."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
@no_type_check
def bfloat_bits(x):
    """Return the bits of a float32 rounded to bfloat16, ties to even; a cast may truncate."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@triton.jit
@no_type_check
def number_bits(x, KIND: tl.constexpr):
    """Return the stored bits of numbers, unchanged if they have the stored dtype."""
    if KIND == 1:
        return as_float(x).to(tl.int32, bitcast=True)
    elif KIND == 2:
        if x.dtype == tl.float16:
            return x.to(tl.int16, bitcast=True).to(tl.int32)
        else:
            return half_bits(as_float(x))
    else:
        if x.dtype == tl.bfloat16:
            return x.to(tl.int16, bitcast=True).to(tl.int32)
        else:
            return bfloat_bits(as_float(x))


@triton.jit
@no_type_check
def from_bits(bits, KIND: tl.constexpr):
    """Return the numbers of stored bits, in the stored dtype."""
    if KIND == 1:
        return bits.to(tl.float32, bitcast=True)
    elif KIND == 2:
        return bits.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
@no_type_check
def store_bits(place, bits, some, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Store the low `SIZE` bytes of each int32 at its address; by bytes if it may be unaligned."""
    if SIZE == 1:
        tl.store(place, bits.to(tl.uint8), some)
    elif not ALIGNED:
        for byte in tl.static_range(SIZE):
            tl.store(place + byte, (bits >> (8 * byte)).to(tl.uint8), some)
    elif SIZE == 2:
        tl.store(place.to(tl.pointer_type(tl.int16)), bits.to(tl.int16), some)
    else:
        tl.store(place.to(tl.pointer_type(tl.int32)), bits, some)


@triton.jit
@no_type_check
def load_bits(place, some, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Load `SIZE` bytes from each address into an int32; 0 if masked."""
    if SIZE == 1:
        return tl.load(place, some, other=0).to(tl.int32)
    elif not ALIGNED:
        bits = tl.load(place, some, other=0).to(tl.int32)
        for byte in tl.static_range(1, SIZE):
            bits = bits | (tl.load(place + byte, some, other=0).to(tl.int32) << (8 * byte))
        return bits
    elif SIZE == 2:
        return tl.load(place.to(tl.pointer_type(tl.int16)), some, other=0).to(tl.int32)
    else:
        return tl.load(place.to(tl.pointer_type(tl.int32)), some, other=0)
