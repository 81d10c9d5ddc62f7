"""The pages that commands write with `--html`, parsed."""

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "br", "img", "link", "hr"}


class Page(HTMLParser):
    """Elements that are opened and closed in order, their attributes, and what is in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.inside.append((self.open[-1], data))

    def texts(self, tag: str) -> list[str]:
        return [data for within, data in self.inside if within == tag]

    def facts(self) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(self.texts("script")[0])
        return fields
