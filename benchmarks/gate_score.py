"""What the scores of a gate cost: native code over torch.

A gate of 16 units scores a prompt of one layer, or the new token of every layer in a decode step,
in bfloat16. Heads are those of SmolLM2 and of Llama-3.1-8B; vectors and weights are random numbers.
Both ways run in this process, turn by turn, several times on end, as a model leaves the vectors in
the cache; a ratio is the median over the turns, and seconds are processor time of one thread.
"""

import argparse
from collections.abc import Iterator

import _result
import torch
from _timing import timed
from rich.console import Console

from kv_cpu import chosen
from kv_evict.gate_features import width
from kv_evict.gate_file import Facts, GateWeights
from kv_evict.gate_kernels import kernels_of
from kv_evict.gate_network import GateNetwork
from kv_policy import CacheShape, LayerView, Rope

CONSOLE = Console(stderr=True)
SHAPES = {"llama": (32, 8, 128), "smollm2": (30, 3, 64)}  # layers, KV heads, dimensions
UNITS = 16
PLACE = 4000  # of the tokens that are generated
Row = dict[str, object]


def gate_of(shape: CacheShape) -> GateWeights:
    """A gate of random weights."""
    lead, count = (shape.layers, shape.kv_heads), width(shape.key_dim, shape.value_dim)
    facts = Facts(
        model="random",
        fingerprint="",
        text="",
        digest="",
        tokens=1,
        window=1,
        layers=shape.layers,
        heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        units=UNITS,
        overlap={},
    )
    weights = [torch.randn(*lead, count, *rest) * count**-0.5 for rest in ((), (UNITS,))]
    network = GateNetwork(*weights, torch.randn(*lead, UNITS) * 0.1)
    return GateWeights(facts, network.halves(), torch.linspace(0, 1, 11))


def view_of(shape: CacheShape, layers: int, tokens: int) -> LayerView:
    """Tokens as a model computes them, all heads of a token together."""
    sizes, lead = (layers, tokens, shape.kv_heads), (layers, shape.kv_heads, tokens)
    key, value = (
        torch.randn(*sizes, dim).bfloat16().transpose(1, 2)
        for dim in (shape.key_dim, shape.value_dim)
    )
    first = 0 if tokens > 1 else PLACE
    place = torch.arange(first, first + tokens).expand(lead)
    return LayerView(
        layer=torch.arange(layers),
        shape=shape,
        position=place,
        fresh=place >= 0,
        score=torch.zeros(lead),
        length=torch.full((layers,), first + tokens),
        keys=key,
        values=value,
    )


def rows(tokens: int, rounds: int) -> Iterator[Row]:
    """Time a prompt and a decode step of both models."""
    for model, (layers, heads, dim) in SHAPES.items():
        rope = Rope(tuple(1e4 ** (-2 * i / dim) for i in range(dim // 2)))
        shape = CacheShape(layers, heads, 1, dim, dim, rope=rope)
        gate = gate_of(shape)
        for name, view in (
            ("prompt", view_of(shape, 1, tokens)),
            ("step", view_of(shape, layers, 1)),
        ):
            network = gate.on(torch.device("cpu"))
            assert kernels_of(view, network, gate.logarithm) is not None
            ways = {
                "native": lambda gate=gate, view=view: gate.score(view),
                "torch": lambda gate=gate, view=view: gate.logarithm(view).clamp(max=0).exp(),
            }
            with torch.inference_mode():
                turns = timed(ways, rounds, repeats=5 if name == "prompt" else 20)
            yield {
                "model": model,
                "pass": name,
                "layers": len(view.layer),
                "heads": heads,
                "dim": dim,
                "units": UNITS,
                "tokens": view.position.shape[-1],
                "rounds": rounds,
                "native_s": turns.median("native"),
                "torch_s": turns.median("torch"),
                "native_over_torch": turns.quartiles(("native",), ("torch",)),
            }


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    quick = parser.parse_args().quick
    CONSOLE.print(f"instruction set {chosen()}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: list[Row] = []
    summary: dict[str, float] = {}
    for row in rows(200 if quick else 2000, 3 if quick else 31):
        found.append({"isa": chosen(), **row})
        CONSOLE.print(found[-1])
        quartiles = row["native_over_torch"]
        assert isinstance(quartiles, list)
        summary[f"native_over_torch_{row['model']}_{row['pass']}"] = quartiles[1]
    for name, value in summary.items():
        print(f"{name:36} {value:.4f}")
    _result.write("gate_score", summary, found, quick=quick)


if __name__ == "__main__":
    main()
