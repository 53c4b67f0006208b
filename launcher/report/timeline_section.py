"""The report's section on time: who did what, and how much of the engines' time was a bubble."""

import html
from collections.abc import Mapping, Sequence

from launcher.report.html import grid, section
from launcher.report.plots import Series, lines, stacked
from launcher.report.run_timeline import RunTimeline, Step
from launcher.report.timeline_plot import COLOURS, MAX_ENGINES, engine_rows
from rollout.tracing.timeline import Part

NUM_STEPS_SHOWN = 3
ABOUT = (
    "timeline.json opens in ui.perfetto.dev and holds the whole run. A saturated engine is one with as many requests "
    "as engines of this run were seen to serve at once; the bubble is the time that the same tokens would not have "
    "taken there."
)


def timeline_section(run: RunTimeline, metrics: Sequence[Mapping[str, float]]) -> str:
    """Picture and charts; empty for a run that recorded neither spans nor forwards."""
    if run.bounds_s is None:
        return ""
    said = "".join(f"<p>{html.escape(note)}</p>" for note in [ABOUT, *run.notes, *_left_out(run)])
    charts = grid(
        [
            ("Where the engines' time went", _decomposition(metrics)),
            ("Bubble, and the part of it in which an engine runs nothing", _bubble(metrics)),
        ]
    )
    return section("Timeline", said + _picture(run) + charts)


def _left_out(run: RunTimeline) -> list[str]:
    if len(run.forwards) <= MAX_ENGINES:
        return []
    return [f"The first {MAX_ENGINES} of {len(run.forwards)} engines are shown; timeline.json has all."]


def _picture(run: RunTimeline) -> str:
    shown = last_steps(run.steps)
    if not shown:
        return ""
    title = f"The last {len(shown)} steps" if len(shown) > 1 else "The last step"
    return f'<figure class="full"><figcaption>{title}</figcaption>{engine_rows("timeline", run, shown)}</figure>'


def last_steps(steps: Sequence[Step]) -> Sequence[Step]:
    """The last few steps without a long pause between them: between two starts of a run may lie days."""
    first = len(steps)
    while first > 0 and len(steps) - first < NUM_STEPS_SHOWN:
        step = steps[first - 1]
        if first < len(steps) and steps[first].start_s - step.end_s > step.end_s - step.start_s:
            break
        first -= 1
    return steps[first:]


def _decomposition(metrics: Sequence[Mapping[str, float]]) -> str:
    """Shares of each step's time that sum to one; nothing where the run was too short to say how full engines were."""
    rows = [row for row in metrics if "timeline/bubble" in row]
    if not rows:
        return ""
    parts = {Part.SATURATED: [1 - row["timeline/bubble"] for row in rows]}
    parts |= {
        part: [row.get(f"timeline/{part.value}_share", 0.0) for row in rows] for part in Part if part not in parts
    }
    known = {part: shares for part, shares in parts.items() if any(share > 0 for share in shares)}
    return stacked(
        "decomposition",
        [row["step"] + 1 for row in rows],
        {part.value.replace("_", " "): shares for part, shares in known.items()},
        unit="share of the step's time",
        colours=[COLOURS[part] for part in known],
    )


def _bubble(metrics: Sequence[Mapping[str, float]]) -> str:
    series = []
    for metric, label in (("timeline/bubble", "bubble"), ("timeline/idle_share", "idle")):
        rows = [row for row in metrics if metric in row]
        if rows:
            steps, values = [row["step"] + 1 for row in rows], [row[metric] for row in rows]
            series.append(Series(label=label, steps=steps, values=values))
    return lines("bubble", series, unit="share of the step's time") if series else ""
