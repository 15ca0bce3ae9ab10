"""Shares on the command line."""


def share(name: str, text: str) -> float:
    """Read 0.05 or 5%; `name` is the option it was given as.

    Raises:
        ValueError: it is no number from 0 to 1.
    """
    piece = text.strip()
    try:
        share = float(piece.removesuffix("%")) / (100 if piece.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{name} {text} is no share; give 0 to 1, or 0% to 100%")
    return share
