"""Reads the pages of the documentation: prose, links, code blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RECORDS = DOCS / "records"
"""Generated from `benchmarks/results`; `tests/benchmarks` compares the two."""
GENERATED = (DOCS / "configuration.md", DOCS / "metrics.md")
FENCE = re.compile(r"^( *)```(\S*) ?(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    kind: str
    """`sh`, `output`, `diff`, or the language of a file."""
    file: str
    """Path of the file that the reader writes or edits; empty for others."""
    text: str


def pages() -> list[Path]:
    """Handwritten pages."""
    written = [page for page in DOCS.rglob("*.md") if page not in GENERATED and RECORDS not in page.parents]
    front = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return sorted([*written, *front, *(ROOT / "examples").rglob("README.md")])


def blocks(page: Path) -> list[Block]:
    """Fenced blocks in order, without the indentation of a list."""
    found = []
    for indent, kind, file, text in FENCE.findall(page.read_text(encoding="utf-8")):
        lines = [line.removeprefix(indent) for line in text.splitlines()]
        found.append(Block(kind=kind, file=file, text="\n".join(lines) + "\n"))
    return found


def links(page: Path) -> Iterator[str]:
    """Relative links, without anchors."""
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path = target.partition("#")[0]
        if path and "://" not in path:
            yield path


def prose(page: Path) -> str:
    """The text without fenced and indented code; code in backticks is one word."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`]*`", "CODE", text)


def sentences(page: Path) -> Iterator[str]:
    """Sentences of paragraphs and list items, and cells of tables."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )|\n(?=\|)|\n(?=#)", prose(page)):
        for cell in paragraph.split("|"):
            plain = LINK.sub("]", re.sub(r"\s+", " ", cell)).strip()
            yield from (sentence for sentence in re.split(r"(?<=[.!?:;]) ", plain) if sentence)
