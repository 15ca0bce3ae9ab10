"""`kv-serve report`: results of evaluations as a page, and as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from kv_eval.cli.targets import expect_apart, write_all
from kv_transformers.cli.console import check_writable, refuse, refusing


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Results of `kv-serve eval`, all of one model."),
    ],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(help="Where the frontier goes as a PNG file, for documents.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(help="Where the frontier goes as an SVG file, for documents.")
    ] = None,
) -> None:
    """Write a page of what policies cost in answers and save in bytes.

    The page is one HTML file that fetches nothing, with the frontier of quality against bytes held,
    the seconds, tables, and how to run it again.
    """
    targets = {"--out": out, "--png": png, "--svg": svg}
    named = {option: path for option, path in targets.items() if path is not None}
    expect_apart(files, "a result", named)
    from kv_eval.report.picture import missing

    reason = missing() if png or svg else None
    if reason is not None:
        refuse(reason)
    from kv_eval.report.read import ReadError, read

    with refusing(ReadError):
        sources = read(files)
    for option, path in named.items():
        check_writable(path, option)
    from kv_eval.report.page import page
    from kv_eval.report.picture import picture

    made = [(out, page(sources))]  # all of it, before anything is written
    if png is not None:
        made.append((png, picture(sources, "png")))
    if svg is not None:
        made.append((svg, picture(sources, "svg")))
    write_all(made)
