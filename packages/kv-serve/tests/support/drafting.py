"""Speculative decoding in tests: configurations, and what engines say of drafts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


def drafted_by(model: str, count: int = 2) -> dict[str, Any]:
    """Return the configuration of drafts by the model of a folder."""
    return {"method": "draft_model", "model": model, "num_speculative_tokens": count}


def counted(engine: "LLM") -> tuple[int, int]:
    """Return the tokens that were drafted, and those accepted."""
    found = {each.name: getattr(each, "value", None) for each in engine.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    drafted, accepted = (int(found[name] or 0) for name in names)
    return drafted, accepted
