# environment: vllm
"""A document that is read once and asked many times, and a multi-turn chat, in a stock vLLM.

SmolLM2-135M, eager, two threads, for each policy an engine for the document and one for the chat,
each in a process of its own. A document of 7,800 tokens of text is compressed by itself
(`kv_prefix`). A cold request reads it, with a question of 48 tokens behind it; a warm one continues
the stored prefix. Seconds are from the request to its
first token; the ratio is of medians. Answers of 24 tokens of warm requests are compared with those
of cold ones. Then 16 questions are asked at once, and all bytes in use, the document's
included, are compared with those of one question, at the maximum of all steps. A chat of ten turns
of 200 tokens, each answered with 50, is held with the states of finished requests (`kv_turns`); the
ratio is of the prompt tokens that were read to all of them, which are read without.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from _arguments import count
from _vllm_engine import Room
from _vllm_load import raw_token_bytes, text_ids
from _vllm_process import STEPPED, THREADS, Row, Rows, apart
from _vllm_ways import figure, options
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from kv_serve.vllm.names import PREFIX, TURNS

POLICIES: Final = (
    "kv-compress:keep=25%+k8v4",
    "gate:file=smollm2-135m,keep=25%,recent=64+k8v4",
    "k8v4:window=64",
)
TWO_THREADS: Final = STEPPED | THREADS | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
QUESTION, ANSWER, SHARERS = 48, 24, 16
TURNS_OF_CHAT, TURN, REPLY = 10, 200, 50


@dataclass(frozen=True)
class Answer:
    """A request's tokens, the seconds to its first one, and the prompt tokens that it read."""

    ids: tuple[int, ...]
    seconds: float
    read: int


class Served:
    """An engine under a policy, in this process."""

    def __init__(self, policy: str, longest: int, *, turns: bool) -> None:
        """Start it, with memory for a few documents; `turns` is its `kv_turns`."""
        room = Room(4 * longest * raw_token_bytes(), longest, 2048, SHARERS)
        given = room.arguments(policy) | {"enable_prefix_caching": True}
        given["additional_config"] = options(policy)["additional_config"] | {TURNS: turns}
        self.engine = LLMEngine.from_engine_args(EngineArgs(**given))
        self.asked = 0

    def ask(
        self, prompts: Sequence[Sequence[int]], answer: int, extra: Mapping[str, object]
    ) -> tuple[list[Answer], int]:
        """Ask all at once; return the answers, and the most bytes in use after a step."""
        settings = SamplingParams(
            temperature=0, max_tokens=answer, ignore_eos=True, extra_args=dict(extra) or None
        )
        names = [f"{self.asked + i}" for i in range(len(prompts))]
        self.asked += len(prompts)
        began = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, settings)
        first: dict[str, float] = {}
        found: dict[str, Answer] = {}
        most = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                name, ids = output.request_id, tuple(output.outputs[0].token_ids)
                first.setdefault(name, time.perf_counter() - began)
                if output.finished:
                    read = len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)
                    found[name] = Answer(ids, first[name], read)
            most = max(most, self.bytes_in_use)
        return [found[name] for name in found], most

    @property
    def bytes_in_use(self) -> int:
        """Bytes of pages of requests and of prefixes, each page once."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        pool = get_kv_transfer_group().worker.pool
        return int(pool.used * pool.page_bytes)

    def reset(self) -> None:
        """Drop all prefixes; the engine notes it in its next step."""
        self.engine.reset_prefix_cache()
        self.ask([[5]], 1, {})


def measure(policy: str, length: int, rounds: int) -> Row:
    """Measure a document under a policy in this process."""
    ids = text_ids()
    document, rest = ids[:length], ids[length:]
    questions = [document + rest[QUESTION * i :][:QUESTION] for i in range(SHARERS)]
    mark = {PREFIX: length}
    served = Served(policy, length + QUESTION + ANSWER, turns=False)
    served.ask([document[:300]], 2, {PREFIX: 200})
    cold: list[Answer] = []
    warm: list[Answer] = []
    one = 0
    for question in questions[:rounds]:
        served.reset()
        (answer,), _ = served.ask([question], ANSWER, mark)
        cold.append(answer)
        (answer,), most = served.ask([question], ANSWER, mark)
        warm.append(answer)
        one = max(one, most)
    _, most = served.ask(questions, ANSWER, mark)
    alike = [a.ids == b.ids for a, b in zip(cold, warm, strict=True)]
    return {
        "tokens": length,
        "cold_s": [each.seconds for each in cold],
        "warm_s": [each.seconds for each in warm],
        "warm_over_cold": median(x.seconds for x in warm) / median(x.seconds for x in cold),
        "read_cold": [each.read for each in cold],
        "read_warm": [each.read for each in warm],
        "identical": sum(alike) / len(alike),
        "one_bytes": one,
        "sharers_bytes": most,
        "sharers_over_one": most / one,
    }


def chat(policy: str) -> Row:
    """Hold a chat in this process; return the prompt tokens read, and all prompt tokens."""
    served, ids = Served(policy, TURNS_OF_CHAT * (TURN + REPLY), turns=True), text_ids()
    read = whole = 0
    told: list[int] = []
    for i in range(TURNS_OF_CHAT):
        told += ids[TURN * i :][:TURN]
        (answer,), _ = served.ask([told], REPLY, {})
        read, whole = read + answer.read, whole + len(told)
        told += answer.ids
    return {"chat_read": read, "chat_whole": whole, "chat_read_over_whole": read / whole}


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--rounds", type=count, default=5, help="questions that are asked cold")
    given = parser.parse_args()
    length, rounds = (600, 2) if given.quick else (7800, given.rounds)
    rows = Rows("vllm_documents", {"tokens": length, "rounds": rounds}, quick=given.quick)
    summary: dict[str, float] = {}
    for policy in POLICIES:
        row = rows.measured(
            {"policy": policy},
            lambda policy=policy: {
                **apart(measure, policy, length, rounds, environment=TWO_THREADS),
                **apart(chat, policy, environment=TWO_THREADS),
            },
        )
        name = figure(policy).split("_keep")[0].split("_file")[0]
        for each in ("warm_over_cold", "sharers_over_one", "chat_read_over_whole", "identical"):
            summary[f"{each}_{name}"] = float(str(row[each]))
    summary["warm_ttft_over_cold_8k"] = max(
        value for name, value in summary.items() if name.startswith("warm_over_cold")
    )
    rows.finish(summary)


if __name__ == "__main__":
    main()
