"""Decode steps over pages that are captured once: replayed, they do what any later step does."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from kv_paging import PagePool
from kv_policy import KVPolicy, compose, parse
from kv_runtime import PolicyCache, RequestBatch, RequestRows, RequestStep, captures_pages
from launches import Graph
from tiered_policies import SHAPE as WIDE
from tiered_policies import Turned

CPU = torch.device("cpu")
SCALE, MOST, LONGEST = 0.4, 3, 60
SHAPE = replace(WIDE, layers=2)
HEADS = SHAPE.kv_heads * SHAPE.group
PROMPTS = {"a": 19, "b": 6, "c": 11, "d": 17}
RAGGED = Turned("62", "15")  # the ranks differ per layer and head
POLICIES = [
    parse("kv-compress:rate=2,floor=8,window=4,recent=4+k8v4"),  # a plan, then tokens are added
    parse("k8v4:window=6"),
    parse("streaming:budget=9,sinks=2+k8v4"),  # each token evicts another
    compose(RAGGED, parse("snapkv:budget=8,window=4")),
]


@dataclass
class Requests:
    """Requests of an engine; every token is drawn beforehand."""

    policy: KVPolicy
    backend: str
    batch: RequestBatch = field(init=False)
    computed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = PolicyCache(self.policy, SHAPE, backend=self.backend).layout.page_bytes
        memory = torch.full((600, size), 255, dtype=torch.uint8)
        self.pool = PagePool.over(memory, poison=True, kernels=self.backend)
        empty = PolicyCache(self.policy, SHAPE, backend=self.backend, pool=self.pool, careful=True)
        self.batch = RequestBatch(empty, SCALE, _fail)
        draw = torch.Generator().manual_seed(2)
        sizes = (HEADS, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim)
        sizes = (*sizes, (SHAPE.kv_heads, SHAPE.value_dim))
        self.tokens = {
            name: [torch.randn(SHAPE.layers, LONGEST, *size, generator=draw) for size in sizes]
            for name in PROMPTS
        }

    def begin(self, names: str, gone: str = "") -> tuple[RequestRows, list[Tensor]]:
        """Begin a step; give its rows, with queries, keys and values of all layers."""
        steps, start, brought = {}, [0], []
        for name in gone:
            del self.computed[name]
        for key, name in enumerate(names):
            done, prompt = self.computed.get(name, 0), PROMPTS[name]
            count = prompt if done < prompt else 1
            steps[7 * key] = RequestStep(name, done, count, prompt, serial=10 + key)
            brought.append([x[:, done : done + count] for x in self.tokens[name]])
            start.append(start[-1] + count)
            self.computed[name] = done + count
        self.batch.begin(steps, tuple(gone))
        given = [torch.cat([each[i] for each in brought], 1) for i in range(3)]
        return RequestRows(tuple(steps), tuple(start)), given

    def step(self, names: str, gone: str = "") -> Tensor:
        """Do a step layer by layer; give what its tokens see, by layer."""
        rows, (query, key, value) = self.begin(names, gone)
        out = torch.full((*query.shape[:3], SHAPE.value_dim), torch.nan)
        for layer in range(SHAPE.layers):
            self.batch.attend(layer, rows, query[layer], key[layer], value[layer], out[layer])
        self.batch.end()
        return out


class Captured(Requests):
    """Requests whose decode steps are captured for one and for `MOST` tokens."""

    def __init__(self, policy: KVPolicy) -> None:
        super().__init__(policy, "triton")
        self.graphs = {count: Graph() for count in (MOST, 1)}
        sizes = (HEADS, SHAPE.key_dim), (SHAPE.kv_heads, SHAPE.key_dim)
        sizes = (*sizes, (SHAPE.kv_heads, SHAPE.value_dim), (HEADS, SHAPE.value_dim))
        self.given = [torch.full((SHAPE.layers, MOST, *size), torch.nan) for size in sizes]
        for count, graph in self.graphs.items():
            for each in (Graph(), graph):  # once to warm up
                self.batch.fix(MOST, LONGEST)
                with each.capture():
                    for layer in range(SHAPE.layers):
                        self.batch.capture(layer, *(x[layer, :count] for x in self.given))

    def replay(self, names: str, gone: str = "") -> Tensor:
        """Do a step of decoding requests by a graph."""
        rows, given = self.begin(names, gone)
        for held, new in zip(self.given, given, strict=False):
            held.fill_(torch.nan)[:, : len(names)] = new
        self.given[3].fill_(torch.nan)
        self.batch.open(rows)
        count = min(count for count in self.graphs if count >= len(names))
        self.graphs[count].replay()
        self.batch.end()
        assert self.batch.replayed
        assert not self.given[3][:, len(names) : count].any()  # what padding sees
        return self.given[3][:, : len(names)]


def _fail(request: str, error: Exception) -> None:
    raise RuntimeError(request) from error


@pytest.mark.parametrize(
    "policy",
    [POLICIES[0], POLICIES[3], *(pytest.param(x, marks=pytest.mark.slow) for x in POLICIES[1:3])],
    ids=str,
)
def test_a_captured_step_replayed_is_any_later_step(policy: KVPolicy) -> None:
    """Of other requests and lengths, in another order, and of fewer; beside steps that are not."""
    own, eager = Captured(policy), Requests(policy, "torch")
    for names, gone in (
        ("ab", ""),
        ("ab", ""),
        ("bac", ""),  # one is a prompt, so that no graph is launched
        ("cab", ""),
        ("ca", ""),  # one pauses
        ("da", "b"),
        *[("dca", "")] * 2,
        ("d", "ca"),
    ):
        started = all(name in eager.computed for name in names)
        wanted = eager.step(names, gone)
        found = own.replay(names, gone) if started else own.step(names, gone)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert own.batch.held(kept=True) == eager.batch.held(kept=True)
    own.batch.begin({}, ("d",))
    assert own.pool.used == 0


@pytest.mark.parametrize("policy", POLICIES[1:2], ids=str)
def test_a_step_of_decoding_requests_may_also_be_launched_layer_by_layer(policy: KVPolicy) -> None:
    """Over the same memory, after a graph and before one."""
    own, eager = Captured(policy), Requests(policy, "torch")
    for number, names in enumerate(("ab", "ba", "ab", "b")):
        wanted = eager.step(names)
        found = own.replay(names) if number % 2 else own.step(names)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert own.batch.held(kept=True) == eager.batch.held(kept=True)


def test_a_graph_launched_between_steps_stores_nothing() -> None:
    own = Captured(POLICIES[0])
    own.step("ab")
    own.replay("ab")
    before = own.batch.held(kept=True)
    own.batch.fix(MOST, LONGEST)
    own.graphs[MOST].replay()
    assert own.batch.held(kept=True) == before
    own.replay("ba")  # and the next step is right


def test_all_layers_of_a_captured_step_share_one_plan_and_no_launch_depends_on_the_requests() -> (
    None
):
    found = [name for name in Captured(POLICIES[0]).graphs[MOST].names if name.endswith("_kernel")]
    layer = ["decode_kernel", "combine_kernel"]
    stored = ["leave_kernel", "give_kernel", "enter_kernel"]
    assert found == ["plan_kernel", *layer * SHAPE.layers, *stored]


def test_a_step_that_no_layer_saw_and_no_graph_can_do_is_not_attended() -> None:
    eager = Requests(POLICIES[0], "torch")
    eager.step("a")
    rows, _ = eager.begin("a")
    eager.batch.open(rows)
    eager.batch.end()
    assert not eager.batch.attended
    own = Captured(POLICIES[0])
    rows, _ = own.begin("a")  # a prompt
    own.batch.open(rows)
    own.batch.end()
    assert not own.batch.attended


def test_more_tokens_than_requests_have_memory_are_not_captured() -> None:
    own = Captured(POLICIES[0])
    given = [x[0].repeat(2, 1, 1) for x in own.given]
    with pytest.raises(ValueError, match="a step of 6 tokens is captured, and memory is fixed for"):
        own.batch.capture(0, *given)


def test_memory_is_fixed_before_requests_decode() -> None:
    eager = Requests(POLICIES[0], "torch")
    eager.step("a")
    with pytest.raises(ValueError, match="requests decode already"):
        eager.batch.fix(MOST, LONGEST)


@pytest.mark.parametrize(
    ("text", "backend", "wanted"),
    [
        ("snapkv:budget=12,window=4+k8v4", "triton", True),
        ("kv-compress:rate=2+k4v2", "triton", True),
        ("k8v4:window=8", "triton", True),
        ("streaming:budget=9+k8v4", "triton", True),
        ("snapkv:budget=12,window=4+k8v4", "torch", False),
        ("leankv", "triton", False),  # generated queries are observed
        ("kv-compress:rate=2,every=4+k8v4", "triton", False),  # here, too
        ("keydiff:budget=9+k8v4", "triton", True),
        ("k4v4:keys=channel,block=16", "triton", False),  # blocks of tokens synchronize
        ("k8v4+quest", "triton", False),  # the host leaves layers out
    ],
)
def test_steps_are_captured_if_the_device_alone_does_them(
    text: str, backend: str, wanted: bool
) -> None:
    policy = parse(text)
    layout = PolicyCache(policy, SHAPE, backend="torch").layout
    assert captures_pages(policy, layout, backend, CPU) is wanted
