"""The contract between the kv packages: policies assign tokens to tiers, codecs store the tiers."""

from kv_policy.backends import Backend, Instructions, installed_backends
from kv_policy.basis import HeadBasis, LayerBasis, fold_values
from kv_policy.bit_layout import BitLayout, PlaneLayout
from kv_policy.budget import Budget
from kv_policy.calibrator import (
    Calibrated,
    Calibrator,
    Collector,
    HeadCalibrator,
    LevelCalibrator,
    LevelError,
    NotCalibratedError,
    Resumable,
    ScoreCalibrator,
    ScoreEvaluation,
    StartsCalibrator,
    StartsHeadCalibrator,
    StartsLevelCalibrator,
    StartsScoreCalibrator,
    calibrate_command,
    load_calibrator,
    load_head_calibrator,
    load_level_calibrator,
    load_score_calibrator,
)
from kv_policy.codec import Codec, FittedCodec, KeyPrefix, TokenFormat
from kv_policy.complete import CompleteSelector, complete
from kv_policy.compose import CompositionError, compose, tier_formats
from kv_policy.contract import (
    DROP,
    FRESH,
    NOBODY,
    Basis,
    Capabilities,
    Formats,
    KVPolicy,
    LayerView,
    Merge,
    MergeView,
    PlanView,
    Queries,
    Selector,
    Step,
    StepView,
    VectorName,
)
from kv_policy.evictor import Evictor, protect, whole_tokens
from kv_policy.folding import FoldsValues
from kv_policy.lifecycle import Observe, Replan, Replay, Running, RunningMean, RunningSum
from kv_policy.ordering import ascending, ascending_order, best
from kv_policy.pages import PagedTokens, PageLayout, TileCounts
from kv_policy.part import Parameter, Part
from kv_policy.raw import Raw, RawCodec, Uncompressed
from kv_policy.reading import PageReading, RankedBy
from kv_policy.registry import BrokenPolicyError, Registry, UnknownPolicyError, installed, load
from kv_policy.same_shape import SameShape, keeps_shape
from kv_policy.selecting import Selecting
from kv_policy.shape import CacheShape, Rope, Ropes
from kv_policy.spec import parse
from kv_policy.spectral import Spectral
from kv_policy.tiered import TieredFormats, read_formats

__all__ = [
    "DROP",
    "FRESH",
    "NOBODY",
    "Backend",
    "Basis",
    "BitLayout",
    "BrokenPolicyError",
    "Budget",
    "CacheShape",
    "Calibrated",
    "Calibrator",
    "Capabilities",
    "Codec",
    "Collector",
    "CompleteSelector",
    "CompositionError",
    "Evictor",
    "FittedCodec",
    "FoldsValues",
    "Formats",
    "HeadBasis",
    "HeadCalibrator",
    "Instructions",
    "KVPolicy",
    "KeyPrefix",
    "LayerBasis",
    "LayerView",
    "LevelCalibrator",
    "LevelError",
    "Merge",
    "MergeView",
    "NotCalibratedError",
    "Observe",
    "PageLayout",
    "PageReading",
    "PagedTokens",
    "Parameter",
    "Part",
    "PlanView",
    "PlaneLayout",
    "Queries",
    "RankedBy",
    "Raw",
    "RawCodec",
    "Registry",
    "Replan",
    "Replay",
    "Resumable",
    "Rope",
    "Ropes",
    "Running",
    "RunningMean",
    "RunningSum",
    "SameShape",
    "ScoreCalibrator",
    "ScoreEvaluation",
    "Selecting",
    "Selector",
    "Spectral",
    "StartsCalibrator",
    "StartsHeadCalibrator",
    "StartsLevelCalibrator",
    "StartsScoreCalibrator",
    "Step",
    "StepView",
    "TieredFormats",
    "TileCounts",
    "TokenFormat",
    "Uncompressed",
    "UnknownPolicyError",
    "VectorName",
    "ascending",
    "ascending_order",
    "best",
    "calibrate_command",
    "complete",
    "compose",
    "fold_values",
    "installed",
    "installed_backends",
    "keeps_shape",
    "load",
    "load_calibrator",
    "load_head_calibrator",
    "load_level_calibrator",
    "load_score_calibrator",
    "parse",
    "protect",
    "read_formats",
    "tier_formats",
    "whole_tokens",
]
