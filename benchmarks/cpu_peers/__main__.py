# environment: cpu-peers
"""Engines that run on CPUs on equal work: the same model, the same token ids, two threads.

OpenVINO GenAI, llama.cpp, vLLM and transformers decode over caches of theirs, and over ours in the
two of them that have it. Each engine runs in an environment and a process of its own, by a script
beside this one; all take turns of a few steps, every second one backwards, and medians count. The
first token of a prompt is timed when nothing else is open. Sequences of a batch hold the same text
in memory of their own. Nats are those of a text's next tokens over a prompt that is held.

Weights are of 16 bits at equal work, of the values that the package's GGUF file has; its own file,
of about 4.5 bits, is measured beside them where an engine can read it. Finished rows
are written to a file beside the result, from which a later run of the same commit resumes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median

from _arguments import count
from _figures import compared, figures, gathered, grown
from _plan import BRIEF, QUICK, WAYS, WHOLE, Cell, Size, Way, cell, spare
from _processes import Processes, processes
from _vllm_process import Row, Rows, alternating

from kv_eval.tasks import Sample, default_text, nll
from kv_transformers.models import load_model
from kv_transformers.models.source import resolve_model


def gguf() -> Path:
    """The model's file.

    Raises:
        ValueError: the model is no such file.
    """
    source = resolve_model()
    if source.kind != "gguf" or source.path is None:
        raise ValueError(f"{source.name} is no GGUF file, which llama.cpp and OpenVINO read")
    return source.path


def nats(engines: Processes, way: Way, samples: Sequence[Sample]) -> Row:
    """Nats per token of each text."""
    found = [
        engines.ask(
            "nats",
            way,
            prompt=[*sample.prompt_ids, *sample.question_ids],
            target=list(sample.target_ids),
        )
        for sample in samples
    ]
    known = None if None in found else mean(found)
    return {"texts": found, "nats": known, "versions": engines.versions[way.engine]}


def turns(
    engines: Processes, ways: Sequence[Way], ids: Sequence[int], what: Cell, size: Size
) -> Row:
    """Read a prompt and decode after it, all ways in turn."""
    given = {"prompt": list(ids[: what.tokens]), "batch": what.batch, "room": spare(size)}
    first: dict[Way, list[float]] = {way: [] for way in ways}
    steps: dict[Way, list[float]] = {way: [] for way in ways}
    held: dict[Way, int] = {}
    for i in range(what.times):
        for way in ways[:: 1 if i % 2 == 0 else -1]:
            opened = engines.ask("open", way, **given)
            first[way].append(opened["first"])
            held[way] = opened["kv_bytes"]
        for _, way in alternating(ways, size.turns):
            steps[way] += engines.ask("steps", way, count=size.steps)[1:]
        for way in ways:
            engines.ask("close", way)
    return {
        "ways": [
            {
                "engine": way.engine,
                "way": way.spec,
                "ours": way.ours,
                "weights": way.weights,
                "kv_bytes": held[way],
                "first": median(first[way]),
                "step": median(steps[way]),
                "firsts": first[way],
                "steps": steps[way],
            }
            for way in ways
        ]
    }


def measure(engines: Processes, rows: Rows, size: Size) -> None:
    """Measure what is not there yet: nats first, then every size."""
    loaded = load_model()
    given = {"length": size.prompt, "samples": size.texts, "continuation": size.target}
    samples = nll(loaded.tokenizer, default_text(), **given)
    ids = loaded.tokenizer.encode(default_text().body, add_special_tokens=False, verbose=False)
    del loaded
    for way in WAYS:
        key: Row = {"kind": "nats", "engine": way.engine, "way": way.spec, "ours": way.ours}
        rows.measured(key, lambda way=way: nats(engines, way, samples))
    for what in size.cells:
        for equal in (True, False):
            key = {"kind": "cell", "batch": what.batch, "tokens": what.tokens, "equal": equal}
            ways = what.ways(equal=equal)
            rows.measured(key, lambda what=what, ways=ways: turns(engines, ways, ids, what, size))


def main() -> None:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run that writes nothing")
    parser.add_argument("--environments", type=Path, required=True, help="folder; nox gives it")
    parser.add_argument(
        "--minutes", type=count, help="start no measurement after so many; a later run resumes"
    )
    parser.add_argument("--cells", type=cell, nargs="+", help="BATCHxTOKENS, in place of all")
    parser.add_argument("--brief", action="store_true", help="less, for a machine in use")
    given = parser.parse_args()
    size = QUICK if given.quick else BRIEF if given.brief else WHOLE
    if given.cells:
        size = replace(size, cells=tuple(given.cells))
    asked = {name: value for name, value in asdict(size).items() if name != "cells"}
    rows = Rows("cpu_peers", asked, quick=given.quick, minutes=given.minutes)
    with processes(given.environments, gguf(), size) as engines:
        measure(engines, rows, size)
    found = gathered(rows.rows)
    rows.rows = [row for row in rows.rows if row["kind"] == "nats"]
    rows.rows += [*found, *grown(found), *compared(found)]
    rows.finish(figures(found))


if __name__ == "__main__":
    main()
