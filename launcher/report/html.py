"""The report's HTML: one self-contained page with inline style. Text is escaped here, HTML fragments are not."""

import html
from collections.abc import Sequence

STYLE = """
:root { --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --ground: #f8fafc; --accent: #2563eb; --card: #fff; }
:root { color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --ground: #0f172a; }
  :root { --accent: #60a5fa; --card: #1e293b; }
  figure svg text { fill: var(--soft) !important; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { margin: 0; font-size: 28px; } h2 { margin: 40px 0 12px; font-size: 19px; }
h3 { margin: 20px 0 8px; font-size: 15px; }
.subtitle { margin: 4px 0 24px; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 12px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile, figure, .card { padding: 14px 16px; margin: 0; }
.tile .label, .tile .note { color: var(--soft); font-size: 13px; }
.tile .value { font-size: 20px; font-weight: 650; font-variant-numeric: tabular-nums; white-space: nowrap; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }
figure svg { width: 100%; height: auto; } figure.wide { margin-top: 12px; max-width: 560px; }
figure.full { margin-bottom: 12px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; }
table { border-collapse: collapse; width: 100%; background: var(--card); }
table { border: 1px solid var(--line); border-radius: 10px; }
@media (max-width: 640px) { table { display: block; overflow-x: auto; } main { padding: 20px 12px 48px; } }
th, td { overflow-wrap: anywhere; padding: 8px 12px; text-align: left; border-bottom: 1px solid var(--line); }
td { font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; font-size: 13px; } td.number, th.number { text-align: right; }
.card { margin-bottom: 10px; } .card p { margin: 0 0 6px; color: var(--soft); font-size: 13px; }
pre { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }
pre.response { border-left: 3px solid var(--accent); padding-left: 10px; }
details { margin-bottom: 8px; } summary { cursor: pointer; }
svg .grid-line { stroke: var(--line); } svg .tick { fill: var(--soft); font-size: 11px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; color: var(--soft); }
.lane { display: flex; align-items: center; gap: 8px; height: 13px; font-size: 11px; color: var(--soft); }
.lane span { flex: 0 0 76px; white-space: nowrap; } .lane svg { flex: 1; min-width: 0; height: 10px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
"""


def page(*, title: str, subtitle: str, body: str) -> str:
    """The whole document; `body` is an HTML fragment."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="subtitle">{html.escape(subtitle)}</p>{body}</main></body></html>\n'
    )


def section(title: str, body: str) -> str:
    """A heading and an HTML fragment."""
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def tiles(items: Sequence[tuple[str, str, str]]) -> str:
    """A row of tiles: label, value, note."""
    cells = "".join(
        f'<div class="tile"><div class="label">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)}</div><div class="note">{html.escape(note)}</div></div>'
        for label, value, note in items
    )
    return f'<div class="tiles">{cells}</div>'


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], *, numbers_from: int) -> str:
    """A table; columns from index `numbers_from` on are aligned as numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ('class="number"' if index >= numbers_from else "" for index in range(len(row)))
        return "".join(f"<{tag} {kind}>{html.escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', heading)}</tr></thead><tbody>{body}</tbody></table>"


def grid(charts: Sequence[tuple[str, str]]) -> str:
    """Charts side by side, each a title and an HTML fragment; a chart with an empty fragment is left out."""
    figures = "".join(f"<figure><figcaption>{title}</figcaption>{chart}</figure>" for title, chart in charts if chart)
    return f'<div class="grid">{figures}</div>'
