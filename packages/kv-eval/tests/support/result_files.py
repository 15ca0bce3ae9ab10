"""Results of evaluations made by hand, and a page read as a tree."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

from kv_eval.evaluate.report import Report, Row
from kv_eval.report.read import Source
from kv_runtime import Serving

VOID = frozenset({"meta", "br"})


def row(policy: str, score: float, held: float, **more: object) -> Row:
    """Make a row of 1,000 bytes for the full cache."""
    fields = {
        **{"task": "needle", "setting": "aware", "length": 200, "samples": 10, "seed": 0},
        **{"full_score": 1.0, "full_bytes": 1000.0, "seconds": 0.0},
    }
    return Row(policy=policy, score=float(score), kv_bytes=float(held), **{**fields, **more})


def report(*rows: Row, **more: object) -> Report:
    """Make a result of some rows."""
    fields = {
        **{"model": "tiny", "commit": "c0ffee", "versions": {"torch": "2.13.0"}},
        "attention": Serving("cpu", "avx2"),
    }
    return Report(rows=rows, **{**fields, **more})


def source(*rows: Row, name: str = "a.json", **more: object) -> Source:
    """Make a source of some rows."""
    return Source(name, report(*rows, **more))


@dataclass
class Node:
    """An element: its attributes, and texts and elements inside it."""

    name: str
    attributes: Mapping[str, str | None] = field(default_factory=dict)
    content: "list[Node | str]" = field(default_factory=list)

    def __getitem__(self, key: str) -> str:
        value = self.attributes[key]
        assert value is not None
        return value

    def all(self, name: str = "", /, **attributes: str) -> "Iterator[Node]":
        """Find elements inside, in order; a class is one of those that an element has."""
        for child in self.content:
            if isinstance(child, Node):
                if child._is(name, attributes):
                    yield child
                yield from child.all(name, **attributes)

    def one(self, name: str = "", /, **attributes: str) -> "Node":
        """Find the only element of its kind."""
        (found,) = self.all(name, **attributes)
        return found

    @property
    def text(self) -> str:
        """All text inside."""
        return "".join(c if isinstance(c, str) else c.text for c in self.content)

    def _is(self, name: str, attributes: Mapping[str, str]) -> bool:
        own = {**self.attributes, "class": None}
        wanted = {k: v for k, v in attributes.items() if k != "class_"}
        classes = (self.attributes.get("class") or "").split()
        return (
            name in ("", self.name)
            and attributes.get("class_", "") in ("", *classes)
            and all(own.get(key) == value for key, value in wanted.items())
        )


def facts(section: Node) -> dict[str, str]:
    """Read the list of terms and what they mean that is inside an element."""
    names, values = ([node.text for node in section.all(kind)] for kind in ("dt", "dd"))
    return dict(zip(names, values, strict=True))


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        node = Node(tag, dict(attrs))
        self.open[-1].content.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().name == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def tree(html: bytes) -> Node:
    """Read a page, and check that every element is closed where it should be."""
    reader = _Reader()
    reader.feed(html.decode())
    reader.close()
    assert reader.open == [reader.root], "something is not closed"
    return reader.root.one("html")
