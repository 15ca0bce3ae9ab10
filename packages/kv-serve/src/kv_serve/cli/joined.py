"""Commands of other packages, found by the entry-point group `kv_serve.commands`.

An entry point names a function for typer, or a `typer.Typer` with commands of its own.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Final

import typer

from kv_transformers.cli.console import refuse, refusing

GROUP: Final = "kv_serve.commands"
PACKAGES: Final = {  # our commands and the package of each
    "calibrate": "kv-eval",
    "capacity": "kv-transformers",
    "chat": "kv-transformers",
    "compress": "kv-transformers",
    "demo": "kv-eval",
    "eval": "kv-eval",
    "fold": "kv-transformers",
    "generate": "kv-transformers",
    "inspect": "kv-eval",
    "recommend": "kv-transformers",
    "report": "kv-eval",
}
ANY: Final = {"ignore_unknown_options": True, "allow_extra_args": True}


def join(app: typer.Typer) -> None:
    """Add the commands of installed packages; a broken one reports the reason and the remedy."""
    own = {command.name for command in app.registered_commands}
    found: dict[str, dict[str, EntryPoint]] = {name: {} for name in PACKAGES}
    for entry in entry_points(group=GROUP):  # duplicates count once
        found.setdefault(entry.name, {}).setdefault(entry.value, entry)
    for name in sorted(found):
        if name not in own:  # commands of kv-serve itself cannot be replaced
            _add(app, name, tuple(found[name].values()))


def _add(app: typer.Typer, name: str, entries: tuple[EntryPoint, ...]) -> None:
    if not entries:
        _stand_in(app, name, f"Needs the package {PACKAGES[name]}.", partial(_missing, name))
        return
    broken = partial(_broken, name, entries)
    if len(entries) > 1:
        _stand_in(app, name, "Claimed by several packages.", broken)
        return
    try:
        command = entries[0].load()
    except (Exception, SystemExit):  # a third-party package may fail in any way
        _stand_in(app, name, "Cannot be imported.", broken)
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _stand_in(app: typer.Typer, name: str, help: str, refusal: Callable[[], None]) -> None:
    """Add a command that accepts any arguments and exits with an error."""

    def command() -> None:
        refusal()

    app.command(name, help=help, context_settings=ANY, add_help_option=False)(command)


def _missing(name: str) -> None:
    """Exit with the name of the command's package and how to install it."""
    from kv_policy.installing import install_command

    package = PACKAGES[name]
    refuse(
        f"the command {name} is in the package {package}, which is not installed: "
        f"`{install_command(package)}`"
    )


def _broken(name: str, entries: tuple[EntryPoint, ...]) -> None:
    """Exit with the reason why an installed command cannot be used, and the remedy."""
    from kv_policy.registry import imported

    with refusing(ValueError):
        imported(f"the command {name!r}", entries)
    refuse(f"the command {name!r} could not be imported before but can be now; run it again")
