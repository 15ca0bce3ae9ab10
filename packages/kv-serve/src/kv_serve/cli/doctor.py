"""`kv-serve doctor`: report what is installed, whether it works, and how to fix it."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kv_transformers.cli.console import err, out

if TYPE_CHECKING:
    from kv_serve.doctor import Diagnosis

BROKEN = 1


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> None:
    """Report what is installed, which attention backend is used, and how to fix what is broken.

    Exits with status 1 if an installed part does not work, and 0 otherwise.
    """
    from kv_serve.doctor import diagnose

    with err().status("testing the installation"):
        found = diagnose()
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        _show(found)
    if found.broken:
        raise typer.Exit(BROKEN)


def _show(found: "Diagnosis") -> None:
    from rich.markup import escape
    from rich.table import Table

    console = out()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(found):
        table.add_row(escape(name), escape(text))
    console.print(table, highlight=False)
    if not found.problems:
        console.print("\n[green]Everything that is installed works.[/]")
    for problem in found.problems:
        word = "[bold red]Broken[/]" if problem.broken else "[yellow]Hint[/]"
        console.print(f"\n{word}: {escape(problem.what)}", soft_wrap=True, highlight=False)
        console.print(f"To do: {escape(problem.remedy)}", soft_wrap=True, highlight=False)


def _rows(found: "Diagnosis") -> Iterator[tuple[str, str]]:
    known = dict(found.versions)
    yield from known.items()
    for each in found.imports:
        if each.error is not None:
            yield f"import {each.name}", "fails"
        elif each.distribution not in known:
            yield each.name, each.version
    there = {each.name for each in found.imports}
    yield from ((name, "not installed") for name in ("triton", "vllm") if name not in there)
    if found.vllm is not None:
        vllm = found.vllm
        serves = "supports policies" if vllm.served else "does not support policies"
        finds = "finds kv-serve" if vllm.plugin else "does not find kv-serve"
        yield "serving", f"vLLM {vllm.version} {serves}; it {finds}"
    for device in found.devices:
        yield f"device {device.name}", f"{device.about}; attention by {device.backend}"
    for backend in found.backends:
        reason = backend.missing or backend.failure
        state = "works" if reason is None else f"does not work: {reason}"
        yield f"backend {backend.name}", f"{state} ({backend.about})"
    if found.native is not None:
        native = found.native
        why = f", forced by {native.forced}" if native.forced else ""
        yield "native code", f"uses {native.chosen}{why}"
        yield "  runs here", ", ".join(native.runnable)
        yield "  was compiled", ", ".join(native.compiled)
    if found.threads is not None:
        threads = found.threads
        omp = threads.omp_num_threads or "not set"
        text = f"{threads.torch} on {threads.cores} cores (OMP_NUM_THREADS {omp})"
        yield "threads", text
    yield "converted models", found.models.folder
    yield "default model", found.models.default_model
