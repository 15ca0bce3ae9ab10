"""Capacities by a configuration alone are those that vLLM reported."""

import re

import pytest

from kv_policy import parse
from kv_transformers.capacity import ModelMemory
from kv_transformers.models.config import weightless_model
from tools.tables.page import result


@pytest.mark.model
@pytest.mark.parametrize(
    "spec", ["k8v4", "k4v2", "leankv", "kv-compress:rate=4", "kv-compress:rate=8+k8v4"]
)
def test_factors_are_those_that_vllm_reported(spec) -> None:
    name = "tokens_" + re.sub(r"\W+", "_", spec)
    stated = result("vllm_capacity")["summary"][name]
    memory = ModelMemory.of(weightless_model())
    context = 8192
    factor = memory.stock(context).token_bytes / memory.under(parse(spec), context).token_bytes
    assert factor == pytest.approx(stated, rel=2e-3)
