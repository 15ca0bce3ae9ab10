"""The command line `kv-serve`."""

from typing import Annotated

import typer

from kv_serve.cli.calibrate import app as calibrate
from kv_serve.cli.console import ending_quietly
from kv_serve.cli.demo import demo
from kv_serve.cli.doctor import doctor
from kv_serve.cli.eval import evaluate
from kv_serve.cli.generate import generate
from kv_serve.cli.inspect import inspect
from kv_serve.cli.policies import policies
from kv_serve.cli.report import report
from kv_serve.cli.serve import CONTEXT, serve

app = typer.Typer(
    name="kv-serve",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo)
app.command("doctor")(doctor)
app.command("generate")(generate)
app.command("eval")(evaluate)
app.command("inspect")(inspect)
app.command("policies")(policies)
app.command("report")(report)
app.command("serve", context_settings=CONTEXT, add_help_option=False)(serve)
app.add_typer(calibrate, name="calibrate")


def _version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("kv-serve"))
        raise typer.Exit
    return wanted


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    """Run language models on compressed KV caches, and measure what that costs and saves."""


def main() -> None:
    """Run the command that the arguments name."""
    with ending_quietly():
        app()
