"""Token formats: how the key and the value of a token become an exact number of bytes."""

from kv_quant.formats import IntegerFormat
from kv_quant.integer import LIMIT, IntegerCodec

__all__ = ["LIMIT", "IntegerCodec", "IntegerFormat"]
