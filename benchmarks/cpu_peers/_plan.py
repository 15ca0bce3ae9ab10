"""What is compared: engines, their ways to hold a cache, and the sizes that are measured."""

from dataclasses import dataclass
from typing import Final

# The session of nox that made the environment, where it is not this one, and the script.
ENGINES: Final = {
    "transformers": (None, "ours_engine.py"),
    "vllm": ("peers-vllm", "vllm_engine.py"),
    "openvino": ("peers-openvino", "openvino_engine.py"),
    "llama.cpp": ("peers-llama", "llama_engine.py"),
}
SIXTEEN: Final = ("bf16", "f16")  # weights of equal work; others are reported beside them
HELD: Final = 32_768  # tokens of all sequences, above which `CROWDED` are left out


@dataclass(frozen=True, slots=True)
class Way:
    """One way of an engine to hold a cache."""

    engine: str
    spec: str
    ours: bool = False

    @property
    def process(self) -> str:
        """The process that runs it: vLLM has one for each way, the others one for all."""
        return f"{self.engine} {self.spec}" if self.engine == "vllm" else self.engine

    @property
    def weights(self) -> str:
        """What it reads as weights; a GGUF file is of Q4_1 with embeddings of Q8_0.

        >>> Way("openvino", "f16:u8/u8").weights
        'f16'
        >>> Way("vllm", "fp8").weights
        'bf16'
        """
        return self.spec.partition(":")[0] if self.engine in ("openvino", "llama.cpp") else "bf16"


WAYS: Final = (
    Way("transformers", "full"),
    Way("transformers", "k8v4", ours=True),
    Way("transformers", "k4v2", ours=True),
    Way("transformers", "kv-compress:rate=4+k8v4", ours=True),
    Way("vllm", "bf16"),
    Way("vllm", "fp8"),
    Way("vllm", "k8v4", ours=True),
    Way("vllm", "kv-compress:rate=4+k8v4", ours=True),
    Way("openvino", "f16:f16/f16"),
    Way("openvino", "f16:u8/u8"),
    Way("openvino", "f16:u4/u4"),
    Way("openvino", "f16:u8/u8+evict=0.25"),
    Way("openvino", "gguf:u8/u8"),
    Way("llama.cpp", "bf16:f16"),
    Way("llama.cpp", "bf16:q8_0"),
    Way("llama.cpp", "bf16:q4_0"),
    Way("llama.cpp", "gguf:q8_0"),
)
# Ways that the largest cell has no room for: with 8 sequences of 4,096 tokens their steps took
# longest, or they cannot be compared, as their nats are unknown.
CROWDED: Final = frozenset(
    way
    for way in WAYS
    if way.engine == "llama.cpp" or way.spec in ("f16:u4/u4", "f16:u8/u8+evict=0.25")
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A batch and a context."""

    batch: int  # sequences
    tokens: int  # of each
    times: int  # that a prompt is read

    def ways(self, *, equal: bool) -> tuple[Way, ...]:
        """Those with weights of 16 bits, or the others.

        transformers' own cache copies all it holds at each step, so a batch has no room for it. All
        caches of a cell are held at once, so the largest leaves out `CROWDED`.
        """
        left = CROWDED if self.batch * self.tokens > HELD else frozenset()
        return tuple(
            way
            for way in WAYS
            if (way.weights in SIXTEEN) is equal
            and way not in left
            and (self.batch == 1 or way.spec != "full")
        )


def cell(text: str) -> Cell:
    """Read `BATCHxTOKENS`.

    Raises:
        ValueError: it is none.

    >>> cell("8x7680")
    Cell(batch=8, tokens=7680, times=1)
    """
    batch, _, tokens = text.partition("x")
    return Cell(int(batch), int(tokens), 1)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    cells: tuple[Cell, ...]  # in this order
    turns: int  # of each way for each time
    steps: int  # of a turn, of which the first is unseen
    prompt: int  # tokens before a text that is scored
    target: int  # tokens that are scored
    texts: int


def spare(size: Size) -> int:
    """Tokens that a sequence decodes while it is open, and a few more."""
    return size.turns * size.steps + 16


WHOLE: Final = Size(
    (Cell(1, 1024, 3), Cell(1, 7680, 2), Cell(8, 7680, 1), Cell(8, 1024, 1), Cell(1, 4096, 3)),
    turns=4,
    steps=6,
    prompt=2048,
    target=128,
    texts=2,
)
BRIEF: Final = Size(
    (Cell(1, 1024, 1), Cell(1, 4096, 1)), turns=3, steps=6, prompt=1024, target=64, texts=1
)
QUICK: Final = Size(
    (Cell(1, 256, 1), Cell(1, 512, 1), Cell(2, 256, 1), Cell(2, 512, 1)), 2, 3, 256, 8, 1
)
