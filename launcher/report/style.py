"""The style of all pages: light and dark, from a phone's width on, without a font or a picture to load."""

from collections.abc import Mapping

_SERIES_LIGHT = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#475569", "#0891b2")
_SERIES_DARK = ("#60a5fa", "#fbbf24", "#34d399", "#c084fc", "#f87171", "#cbd5e1", "#22d3ee")
_TIME: Mapping[str, tuple[str, str]] = {
    "saturated": ("#1d4ed8", "#2f6fed"),
    "underfilled": ("#93c5fd", "#a5cdfd"),
    "tail-wait": ("#f87171", "#dc4c4c"),
    "trainer-wait": ("#bbf7d0", "#1f4d36"),
    "publish-wait": ("#ddd6fe", "#453a78"),
    "gap": ("#fcd34d", "#c9971c"),
    "checkpoint-wait": ("#94a3b8", "#64748b"),
    "other": ("#e5e7eb", "#374151"),
    "train": ("#059669", "#10b981"),
    "publish": ("#7c3aed", "#a78bfa"),
    "checkpoint": ("#475569", "#cbd5e1"),
    "switch": ("#f59e0b", "#fbbf24"),
    "evaluate": ("#0e7490", "#22d3ee"),
}
"""Colours of an engine's time and of what other processes do, on light and on dark ground."""


def _colours(of_ground: int) -> str:
    series = (_SERIES_LIGHT, _SERIES_DARK)[of_ground]
    rules = [f".s{number} {{ --c: {colour}; }}" for number, colour in enumerate(series)]
    rules += [f".{name} {{ --c: {colours[of_ground]}; }}" for name, colours in _TIME.items()]
    return "\n".join(rules)


STYLE = f"""
:root {{ --ink: #0f172a; --soft: #526077; --line: #e2e8f0; --ground: #f8fafc; --accent: #2563eb; --card: #fff; }}
:root {{ color-scheme: light dark; }}
{_colours(0)}
@media (prefers-color-scheme: dark) {{
:root {{ --ink: #e2e8f0; --soft: #a3b1c6; --line: #334155; --ground: #0f172a; --accent: #60a5fa; --card: #1e293b; }}
{_colours(1)}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }}
h1 {{ margin: 0; font-size: 28px; overflow-wrap: anywhere; }}
h2 {{ margin: 40px 0 12px; font-size: 19px; }} h3 {{ margin: 20px 0 8px; font-size: 15px; }}
.subtitle, .note {{ margin: 4px 0; color: var(--soft); overflow-wrap: anywhere; }} .note {{ font-size: 13px; }}
nav {{ display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0 20px; font-size: 14px; }}
a {{ color: var(--accent); text-decoration: none; }} a:hover {{ text-decoration: underline; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 12px; }}
.tile, figure, .card {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; }}
.tile, figure, .card {{ padding: 14px 16px; margin: 0; min-width: 0; }}
.tile .label, .tile .note {{ color: var(--soft); font-size: 13px; }}
.tile .value {{ font-size: 18px; white-space: nowrap; font-weight: 650; font-variant-numeric: tabular-nums; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 12px; }}
figure.wide {{ margin-top: 12px; max-width: 560px; }} figure.full {{ margin: 12px 0; }}
figcaption {{ font-weight: 600; font-size: 14px; margin-bottom: 12px; }}
figcaption span {{ font-weight: 400; color: var(--soft); }}
.plot {{ position: relative; height: 160px; margin: 0 6px 40px 46px; font-size: 11px; color: var(--soft); }}
.plot svg {{ position: absolute; width: 100%; height: 100%; overflow: visible; }}
.plot span {{ position: absolute; white-space: nowrap; font-variant-numeric: tabular-nums; line-height: 1; }}
.plot .y {{ right: 100%; padding-right: 7px; transform: translateY(50%); }}
.plot .x {{ top: 100%; padding-top: 6px; transform: translateX(-50%); }}
.plot .over {{ top: 100%; padding-top: 22px; left: 50%; transform: translateX(-50%); }}
svg path, svg polyline, svg polygon {{ vector-effect: non-scaling-stroke; fill: none; }}
svg .line {{ stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }}
svg .dot {{ stroke: var(--c); stroke-width: 6; stroke-linecap: round; }}
svg .band {{ fill: var(--c); stroke: var(--c); fill-opacity: .22; stroke-opacity: .35; }}
svg .area, svg rect {{ fill: var(--c); }}
svg .grid-line {{ stroke: var(--line); }} svg .limit {{ stroke: #ef4444; stroke-dasharray: 5 4; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 12px; color: var(--soft); }}
.legend b {{ color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }}
.legend i {{ display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }}
.legend i {{ background: var(--c); }}
.note + .tiles, .legend + .grid, .lanes + .legend {{ margin-top: 8px; }}
.lanes {{ font-size: 11px; color: var(--soft); }}
.lane {{ display: flex; align-items: center; gap: 8px; height: 13px; }} .tall .lane {{ height: 26px; }}
.lane > span {{ flex: 0 0 76px; white-space: nowrap; }}
.lane svg, .ticks {{ flex: 1; min-width: 0; height: 10px; }} .tall .lane svg {{ height: 22px; }}
.ticks {{ position: relative; }} .ticks span {{ position: absolute; transform: translateX(-50%); line-height: 1; }}
.ticks span {{ white-space: nowrap; }} .tall .lane.axis {{ height: 18px; }}
.scroll {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ padding: 8px 12px; text-align: left; border-bottom: 1px solid var(--line); }}
th:first-child, td:first-child {{ position: sticky; left: 0; background: var(--card); }}
tr:last-child td {{ border-bottom: 0; }}
td {{ font-variant-numeric: tabular-nums; max-width: 32ch; overflow-wrap: break-word; }}
th {{ color: var(--soft); font-weight: 600; font-size: 13px; }}
td.number, th.number {{ text-align: right; white-space: nowrap; }}
.card {{ margin-bottom: 10px; }} .card p {{ margin: 0 0 6px; color: var(--soft); font-size: 13px; }}
.grid .card {{ margin: 0; }}
pre {{ margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace; }}
pre.response {{ border-left: 3px solid var(--accent); padding-left: 10px; }}
details {{ margin-bottom: 8px; }} summary {{ cursor: pointer; }}
@media (max-width: 640px) {{
main {{ padding: 20px 12px 48px; }} .tile, figure, .card {{ padding: 12px; }}
.tiles {{ grid-template-columns: 1fr 1fr; gap: 8px; }} .tile .value {{ font-size: 15px; white-space: normal; }}
.tile .label, .tile .note {{ font-size: 12px; }} th, td {{ padding: 6px 10px; font-size: 14px; }}
.lane > span {{ flex-basis: 62px; }}
}}
"""
