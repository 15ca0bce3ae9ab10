"""`kv-serve report`: evaluation results as a page, and as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from kv_eval.cli.targets import expect_apart, write_all
from kv_eval.extras import undrawable
from kv_transformers.cli.console import check_writable, refuse, refusing


def report(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Results of `kv-serve eval`, all of one model."),
    ],
    out: Annotated[Path, typer.Option(help="Output file of the page.")] = Path("report.html"),
    png: Annotated[
        Path | None,
        typer.Option(help="Output file of the charts as PNG, for documents."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(help="Output file of the charts as SVG, for documents."),
    ] = None,
) -> None:
    """Write a page with the cost of policies in answers and their saving in bytes.

    The page is one self-contained HTML file with quality against bytes, times,
    tables, and the commands to reproduce it.
    """
    targets = {"--out": out, "--png": png, "--svg": svg}
    named = {option: path for option, path in targets.items() if path is not None}
    expect_apart(files, "a result", named)
    reason = undrawable("a report")
    if reason is not None:
        refuse(reason)
    from kv_eval.report.read import ReadError, read

    with refusing(ReadError):
        sources = read(files)
    for option, path in named.items():
        check_writable(path, option)
    from kv_eval.report.page import page
    from kv_eval.report.picture import picture

    made = [(out, page(sources))]  # render everything before writing anything
    if png is not None:
        made.append((png, picture(sources, "png")))
    if svg is not None:
        made.append((svg, picture(sources, "svg")))
    write_all(made)
