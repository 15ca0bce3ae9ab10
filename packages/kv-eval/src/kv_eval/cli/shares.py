"""Parsing of shares on the command line."""


def share(name: str, text: str) -> float:
    """Parse 0.05 or 5%; `name` is the option, for messages.

    Raises:
        ValueError: the text is not a number from 0 to 1.
    """
    piece = text.strip()
    try:
        share = float(piece.removesuffix("%")) / (100 if piece.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{name} {text} is not a share; use 0 to 1, or 0% to 100%")
    return share
