"""Token formats: codecs that quantize keys and values to an exact number of bytes."""

from kv_quant.affine import LIMIT
from kv_quant.block_float import BlockFloatCodec
from kv_quant.blocks import ChannelCodec, RowsCodec
from kv_quant.codebook import CodebookCodec
from kv_quant.fitted import LevelsCodec
from kv_quant.formats import IntegerFormat
from kv_quant.integer import IntegerCodec
from kv_quant.outliers import OutlierCodec

__all__ = [
    "LIMIT",
    "BlockFloatCodec",
    "ChannelCodec",
    "CodebookCodec",
    "IntegerCodec",
    "IntegerFormat",
    "LevelsCodec",
    "OutlierCodec",
    "RowsCodec",
]
