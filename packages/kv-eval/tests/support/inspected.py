"""What was kept of a prompt, made by hand."""

from collections.abc import Sequence
from typing import Final

from kv_eval.inspection.record import Inspection, Spot, Token
from kv_runtime import Serving

TEXTS: Final = ("The", " harbour", " <b>", "\n\n", "", "quiet")
HELD: Final = (("00..11", "0.0011"), ("000011", "...0.1"))


def inspection(
    texts: Sequence[str] = TEXTS,
    held: Sequence[Sequence[str]] = HELD,
    names: Sequence[str] = ("k8v4", "raw window"),
    **more: object,
) -> Inspection:
    """Make one of some texts of tokens, and where each head of each layer holds them."""
    heads = [head for layer in held for head in layer]
    digits = [str(i) for i in range(len(names))]
    fields = {
        **{"model": "tiny", "policy": "k8v4:window=2", "attention": Serving("cpu", "avx2")},
        **{"versions": {"torch": "2.13.0"}, "kv_bytes": 1500, "full_bytes": 6000},
        "memory": {
            **{"vector_bytes": 1100, "score_bytes": 0, "position_bytes": 0, "unfilled_bytes": 100},
            **{"spare_bytes": 60, "window_bytes": 200, "table_bytes": 40, "basis_bytes": 0},
        },
    }
    return Inspection(
        layers=len(held),
        heads=len(held[0]),
        places=tuple(
            Spot(
                name=name,
                kind="window" if name == "raw window" else "tier",
                tokens=sum(head.count(digit) for head in heads),
                bytes=200 if name == "raw window" else 1100,
            )
            for name, digit in zip(names, digits, strict=True)
        ),
        tokens=tuple(
            Token(
                id=i,
                text=text,
                name="" if text else "<s>",
                held=tuple(sum(head[i] == digit for head in heads) for digit in digits),
            )
            for i, text in enumerate(texts)
        ),
        kept=tuple(tuple(len(head) - head.count(".") for head in layer) for layer in held),
        held=tuple(map(tuple, held)),
        **{**fields, **more},
    )
