"""Fences, code spans and links of a Markdown file, with their lines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:^<!-- *(?P<note>.*?) *-->\n+)?^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)((?:(?!\n\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Piece:
    """A fence, span or link target."""

    text: str
    line: int
    language: str = ""
    note: str = ""
    """The HTML comment on the line before a fence, such as `run` or `exit 2`."""


@dataclass(frozen=True)
class Document:
    """A Markdown file."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Document:
        """The file at `path`."""
        return cls(path, path.read_text(encoding="utf-8"))

    @property
    def fences(self) -> list[Piece]:
        """Fenced blocks in order."""
        return [
            Piece(found["text"], self._line(found.start("text")), found["language"], found["note"] or "")
            for found in FENCE.finditer(self.text)
        ]

    @property
    def spans(self) -> list[Piece]:
        """Code spans outside fences, in tables too; line breaks inside are spaces."""
        prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), self.text)
        return [
            Piece(" ".join(found[2].replace("\\|", "|").split()), prose.count("\n", 0, found.start()) + 1)
            for found in SPAN.finditer(prose)
        ]

    @property
    def links(self) -> list[Piece]:
        """Targets of links."""
        return [Piece(found[1], self._line(found.start())) for found in LINK.finditer(self.text)]

    def at(self, line: int) -> str:
        """A place in this file, for a message."""
        return f"{self.path.name}:{line}"

    def _line(self, offset: int) -> int:
        return self.text.count("\n", 0, offset) + 1
