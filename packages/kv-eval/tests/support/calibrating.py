"""Calls of `kv-serve calibrate`, and what they print."""

from typer.testing import CliRunner, Result

from kv_serve.cli import app


def calibrated(method: str, *arguments: object) -> Result:
    """Run `kv-serve calibrate METHOD` in this process."""
    return CliRunner().invoke(app, ["calibrate", method, *map(str, arguments)])


def said(result: Result) -> str:
    """Return what was printed to standard error, in one line and without borders."""
    return " ".join(result.stderr.replace("│", " ").split())
