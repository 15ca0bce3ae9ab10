"""Token selection policies from the literature: eviction, and sorting into precision tiers."""

from kv_evict.adakv import AdaPyramidKV, AdaSnapKV
from kv_evict.cake import CAKE
from kv_evict.cam import CaM
from kv_evict.chunkkv import ChunkKV
from kv_evict.d2o import D2O
from kv_evict.duo import Duo
from kv_evict.expected_attention import ExpectedAttention
from kv_evict.fastgen import FastGen
from kv_evict.gate import Gate
from kv_evict.h2o import H2O
from kv_evict.headkv import HeadKV
from kv_evict.keydiff import KeyDiff
from kv_evict.keyformer import Keyformer
from kv_evict.knorm import Knorm
from kv_evict.kv_compress import KVCompress
from kv_evict.kvcrush import KVCrush
from kv_evict.kvmerger import KVMerger
from kv_evict.kvzip import KVzip
from kv_evict.lagkv import LagKV
from kv_evict.leankv import LeanKV
from kv_evict.leankv_profile import Profile
from kv_evict.prefixkv import PrefixKV
from kv_evict.pyramidinfer import PyramidInfer
from kv_evict.pyramidkv import PyramidKV
from kv_evict.quest import Quest
from kv_evict.r_kv import RKV
from kv_evict.razor import Razor
from kv_evict.scissorhands import Scissorhands
from kv_evict.simlayerkv import SimLayerKV
from kv_evict.snapkv import SnapKV
from kv_evict.streaming import Streaming
from kv_evict.tova import TOVA
from kv_evict.zigzagkv import ZigZagKV

__all__ = [
    "CAKE",
    "D2O",
    "H2O",
    "RKV",
    "TOVA",
    "AdaPyramidKV",
    "AdaSnapKV",
    "CaM",
    "ChunkKV",
    "Duo",
    "ExpectedAttention",
    "FastGen",
    "Gate",
    "HeadKV",
    "KVCompress",
    "KVCrush",
    "KVMerger",
    "KVzip",
    "KeyDiff",
    "Keyformer",
    "Knorm",
    "LagKV",
    "LeanKV",
    "PrefixKV",
    "Profile",
    "PyramidInfer",
    "PyramidKV",
    "Quest",
    "Razor",
    "Scissorhands",
    "SimLayerKV",
    "SnapKV",
    "Streaming",
    "ZigZagKV",
]
