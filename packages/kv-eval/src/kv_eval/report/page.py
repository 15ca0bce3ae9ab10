"""The page of results: what is on it, and in which order."""

from collections.abc import Sequence
from typing import Final

from kv_eval.report.frame import Section, frame
from kv_eval.report.frontier import panels
from kv_eval.report.kept import kept
from kv_eval.report.quality import quality
from kv_eval.report.read import Source
from kv_eval.report.run import run
from kv_eval.report.spectra import spectra
from kv_eval.report.speed import speed

TITLE: Final = "Quality against bytes held"


def page(sources: Sequence[Source]) -> bytes:
    """Write the page of one or more files of one model, as UTF-8.

    Without a script it has every picture, table and number; the script adds sorting, and what a
    point says when it is pointed at.

    Args:
        sources: as `read` gives them.
    """
    found, names = panels(sources), tuple(source.name for source in sources)
    sections = (
        Section("quality", "Quality", quality(found, names)),
        Section("speed", "Speed", speed(found, names)),
        Section("kept", "Tokens kept", kept(sources)),
        Section("spectra", "Singular values", spectra(sources)),
        Section("run", "What was run", run(sources)),
    )
    return frame(TITLE, sources[0].report.model, sections)
