"""The HTML of all pages: self-contained, with inline style. Text is escaped here, HTML fragments are not.

A page has a content security policy that forbids the browser every request, so nothing that a model wrote into a
sample can open a connection.
"""

import html
import re
from collections.abc import Sequence

from launcher.report.style import STYLE

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(*, title: str, subtitle: str, body: str) -> str:
    """The whole document; `body` is an HTML fragment. Links lead to its sections."""
    links = "".join(
        f'<a href="#{name}">{heading}</a>' for name, heading in re.findall(r'<section id="(.*?)"><h2>(.*?)</h2>', body)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p>'
        f"<nav>{links}</nav>{body}</main></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A heading and an HTML fragment."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{body}</section>'


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """A row of tiles: label, value, note."""
    cells = "".join(
        f'<div class="tile"><div class="label">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)}</div><div class="note">{html.escape(note)}</div></div>'
        for label, value, note in items
    )
    return f'<div class="tiles">{cells}</div>'


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int) -> str:
    """A table that scrolls sideways on a narrow screen; columns from index `numbers_from` on are aligned as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if index >= numbers_from else "" for index in range(len(row)))
        return "".join(f"<{tag}{kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    head = f"<thead><tr>{cells('th', heading)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def grid(charts: Sequence[tuple[str, str, str]]) -> str:
    """Charts side by side, each a title, a unit and an HTML fragment; a chart with an empty fragment is left out."""
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}{_unit(unit)}</figcaption>{chart}</figure>"
        for title, unit, chart in charts
        if chart
    )
    return f'<div class="grid">{figures}</div>' if figures else ""


def _unit(unit: str) -> str:
    return f" <span>{html.escape(unit)}</span>" if unit else ""
