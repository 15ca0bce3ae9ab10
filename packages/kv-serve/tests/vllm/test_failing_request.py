"""A request for which a policy raises, in a real engine: only this request ends.

No other engine may run in this process, as two would share the worker's side of a connector.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from live_engine import OPTIONS, ends, is_empty

if TYPE_CHECKING:
    from vllm import LLM

Start = Callable[..., AbstractContextManager["LLM"]]
Greedy = Callable[["LLM", Sequence[Sequence[int]], int], list[list[int]]]
TOUCHY = """
from dataclasses import dataclass
from typing import ClassVar
from kv_evict.h2o import H2O

@dataclass(frozen=True)
class Touchy(H2O):
    name: ClassVar[str] = "touchy"
    running: ClassVar[None] = None  # or a host need not call `score` in decode steps

    def score(self, view):
        if bool((view.length == 77).any()):
            raise ArithmeticError("a sequence has 77 tokens")
        return super().score(view)
"""


@pytest.fixture
def touchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a package with a policy that raises at a sequence of 77 tokens."""
    (tmp_path / "touchy.py").write_text(TOUCHY)
    info = tmp_path / "touchy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: touchy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kv_policy]\ntouchy = touchy:Touchy\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "touchy:budget=40+k8v4"


def test_a_policy_that_fails_about_a_request_ends_that_request_alone(
    start: Start, tiny: Callable[..., str], greedy: Greedy, touchy: str
) -> None:
    from vllm import SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(3, 256) for _ in range(n)] for n in (50, 70, 77, 90, 60)]
    answers = (12, 20, 1, 12, 12)
    with start(tiny(), touchy, kv_cache_memory_bytes=400_000, **OPTIONS) as engine:
        alone = [greedy(engine, [prompts[i]], answers[i])[0] for i in (0, 3, 4)]
        settings = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in answers
        ]
        asked = [{"prompt_token_ids": each} for each in prompts]
        found = [each.outputs[0] for each in engine.generate(asked, settings, use_tqdm=False)]
        assert [each.finish_reason for each in found] == [
            *("length", "error", "error", "length", "length")
        ]
        assert [list(found[i].token_ids) for i in (0, 3, 4)] == alone
        assert [len(found[i].token_ids) for i in (1, 2)] == [7, 0]
        assert is_empty(engine, greedy)
        assert not ends(engine)[1].requests.failed
