"""Requirements of kv-eval's extras, by name: kv-eval itself may not be on the index."""

from importlib.util import find_spec
from typing import Final

LM_EVAL: Final = "lm-eval>=0.4.13"  # the extra `lm-eval`
ALTAIR: Final = "altair[save]>=6"  # the extra `plot`; `save` brings vl-convert


def undrawable(what: str) -> str | None:
    """Return why no chart can be drawn, as a sentence; None if it can.

    Args:
        what: needs a chart, such as an option.
    """
    if all(map(find_spec, ("altair", "vl_convert"))):
        return None
    from kv_policy.installing import install_command  # with torch

    return f"{what} needs Altair with vl-convert, which draw charts: `{install_command(ALTAIR)}`"
