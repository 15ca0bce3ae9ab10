"""Commands of other packages, found by the entry-point group `kv_serve.commands`.

An entry names a function that typer can run, or a `typer.Typer` with commands of its own.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

import typer

from kv_transformers.cli.console import refuse

GROUP: Final = "kv_serve.commands"
PACKAGES: Final = {  # commands of ours, and the package that brings each
    "calibrate": "kv-eval",
    "demo": "kv-eval",
    "eval": "kv-eval",
    "generate": "kv-transformers",
    "inspect": "kv-eval",
    "report": "kv-eval",
}
ANY: Final = {"ignore_unknown_options": True, "allow_extra_args": True}


def join(app: typer.Typer) -> None:
    """Add the commands of installed packages; one that cannot run says why, and what to do."""
    own = {command.name for command in app.registered_commands}
    found: dict[str, list[EntryPoint]] = {name: [] for name in PACKAGES}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    for name in sorted(found):
        if name not in own:  # a command of kv-serve itself cannot be replaced
            _add(app, name, found[name])


def _add(app: typer.Typer, name: str, entries: list[EntryPoint]) -> None:
    if not entries:
        package = PACKAGES[name]
        sentence = f"the command {name} is in the package {package}, which is not installed"
        _stand_in(app, name, f"Needs the package {package}.", sentence, package)
        return
    if len(entries) > 1:
        owners = " and ".join(sorted(map(_owner, entries)))
        remedy = "uninstall all but one of them"
        sentence = f"the command {name} is claimed by the packages {owners}; {remedy}"
        _stand_in(app, name, "Claimed by several packages.", sentence)
        return
    try:
        command = entries[0].load()
    except Exception as error:  # a package may fail in any way when it is imported
        reason = f"{type(error).__name__}: {error}"
        sentence = f"the command {name}, of the package {_owner(entries[0])}, cannot be imported: "
        _stand_in(app, name, "Cannot be imported.", sentence + reason)
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=name)
    else:
        app.command(name)(command)


def _stand_in(
    app: typer.Typer, name: str, help: str, sentence: str, package: str | None = None
) -> None:
    """Add a command that takes any arguments and refuses with a sentence.

    Args:
        app: the command line.
        name: of the command.
        help: a line on it.
        sentence: what is wrong.
        package: what to install.
    """

    def refusal() -> None:
        if package is None:
            refuse(sentence)
        from kv_policy.installing import install_command

        refuse(f"{sentence}: `{install_command(package)}`")

    app.command(name, help=help, context_settings=ANY, add_help_option=False)(refusal)


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "of an unknown name"
