"""What a browser and a reader of Markdown find in a page, and what no text of a run may become there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

from markdown_it import MarkdownIt

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2028]")
VOID = {"meta", "br", "wbr", "img", "input", "link", "hr"}


@dataclass
class Parsed(HTMLParser):
    """What a browser would find: elements, attributes, texts, and whether every element is closed."""

    elements: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @classmethod
    def of(cls, page: str) -> Parsed:
        parsed = cls()
        parsed.feed(page)
        parsed.close()
        assert parsed.open == []
        return parsed


def require_plain_html(made: str, benign: str) -> Parsed:
    """Return a page, of which no element and no attribute is one that a page of harmless names does not have."""
    parsed, harmless = Parsed.of(made), Parsed.of(benign)
    # Where a name may be broken, which holds nothing: a name with an underscore has one.
    assert parsed.elements <= harmless.elements | {"wbr"}
    names = {(tag, name) for tag, name, _ in parsed.attributes}
    assert names <= {(tag, name) for tag, name, _ in harmless.attributes}
    assert not CONTROLS.search(made)
    made.encode("utf-8")
    return parsed


def require_plain_markdown(made: str) -> None:
    """No text of a Markdown page is markup, an address, a control character, or a cell of a table."""
    body = made.split(" -->\n\n", 1)[-1]
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inline = [child for token in tokens for child in (token.children or [])]
    kinds = {token.type for token in [*tokens, *inline]}
    assert kinds.isdisjoint({"html_block", "html_inline", "link_open", "image", "code_inline", "em_open", "hr"})
    headings = [tokens[number + 1].content for number, token in enumerate(tokens) if token.type == "heading_open"]
    assert not any(heading.startswith("Heading") for heading in headings)
    assert not CONTROLS.search(made)
    assert not re.search(
        r"(?<!`)https?://|(?<![\w`])www\.evil", re.sub(r"```+text\n.*?\n```+", "", body, flags=re.DOTALL)
    )
    made.encode("utf-8")
    for table in re.findall(r"(?:^\| .*\|\n)+", made, re.MULTILINE):
        borders = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(borders) == 1, table
