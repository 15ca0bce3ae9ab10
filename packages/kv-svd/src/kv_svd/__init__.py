"""Low-rank bases for the keys and values of each head, and the choice of their ranks."""

from kv_policy.orthogonal import spreading
from kv_svd.calibration import Calibration
from kv_svd.channel_scale import ChannelScale
from kv_svd.file import Facts, load, load_facts, save
from kv_svd.fit import (
    Directions,
    Moments,
    basis,
    of_output,
    of_queries,
    of_tokens,
    ranks,
    rotation,
)
from kv_svd.hadamard import Hadamard
from kv_svd.kq_svd import KqSvd, best_pair
from kv_svd.palu import Palu
from kv_svd.rates import Allotment, at_rate, at_removal, greatest_rate, levels, uniform
from kv_svd.statistics import LayerStatistics, Statistics, nothing_seen
from kv_svd.svd_kv import SvdKV
from kv_svd.think import ThinK
from kv_svd.zack import Zack

__all__ = [
    "Allotment",
    "Calibration",
    "ChannelScale",
    "Directions",
    "Facts",
    "Hadamard",
    "KqSvd",
    "LayerStatistics",
    "Moments",
    "Palu",
    "Statistics",
    "SvdKV",
    "ThinK",
    "Zack",
    "at_rate",
    "at_removal",
    "basis",
    "best_pair",
    "greatest_rate",
    "levels",
    "load",
    "load_facts",
    "nothing_seen",
    "of_output",
    "of_queries",
    "of_tokens",
    "ranks",
    "rotation",
    "save",
    "spreading",
    "uniform",
]
