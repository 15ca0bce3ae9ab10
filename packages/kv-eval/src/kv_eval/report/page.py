"""The page of results and its sections."""

from collections.abc import Sequence
from typing import Final

from kv_eval.report.frame import Section, frame
from kv_eval.report.frontier import panels
from kv_eval.report.kept import kept
from kv_eval.report.quality import quality
from kv_eval.report.read import Source
from kv_eval.report.run import run
from kv_eval.report.spectra import spectra

TITLE: Final = "Quality against bytes held"


def page(sources: Sequence[Source]) -> bytes:
    """Return the page of one or more files of one model, as UTF-8.

    Without JavaScript it has every picture, table and number; the script adds sorting and tooltips
    of points.

    Args:
        sources: from `read`.
    """
    found, names = panels(sources), tuple(source.name for source in sources)
    sections = (
        Section("quality", "Quality", quality(found, names)),
        Section("kept", "Tokens kept", kept(sources)),
        Section("spectra", "Singular values", spectra(sources)),
        Section("run", "What was run", run(sources)),
    )
    return frame(TITLE, sources[0].report.model, sections)
