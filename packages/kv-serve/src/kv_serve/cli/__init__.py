"""The command line `kv-serve`: its own commands and those of other packages."""

from typing import Annotated, Final

import typer

from kv_serve.cli.doctor import doctor
from kv_serve.cli.joined import join
from kv_serve.cli.policies import policies
from kv_serve.cli.serve import CONTEXT, serve
from kv_transformers.cli.console import ending_quietly

# As help lists them; groups of commands and those of third parties follow.
ORDER: Final = (
    "serve",
    "demo",
    "chat",
    "generate",
    "recommend",
    "capacity",
    "policies",
    "doctor",
    "inspect",
    "eval",
    "report",
)


app = typer.Typer(
    name="kv-serve",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("doctor")(doctor)
app.command("policies")(policies)
app.command("serve", context_settings=CONTEXT, add_help_option=False)(serve)
join(app)
app.registered_commands.sort(key=lambda each: (*ORDER, each.name).index(each.name))


def _version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("kv-serve"))
        raise typer.Exit
    return wanted


@app.callback()
def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run language models on compressed KV caches, and measure the cost and the savings."""


def main() -> None:
    """Run the command named by the arguments."""
    with ending_quietly():
        app()
