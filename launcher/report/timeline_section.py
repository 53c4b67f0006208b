"""The report's section on time: timeline of all actors, and the bubble of the engines' time."""

import html
from collections.abc import Mapping, Sequence

from launcher.report.html import grid, section
from launcher.report.plots import Series, lines, stacked
from launcher.report.run_timeline import RunTimeline, Step
from launcher.report.timeline_plot import COLOURS, MAX_ENGINES, engine_rows
from rollout.tracing.timeline import Part

NUM_STEPS_SHOWN = 3
ABOUT = (
    "timeline.json holds the whole run and opens in ui.perfetto.dev. A saturated engine runs as many requests as the "
    "engines of this run ran at most. The bubble is the time that saturated engines would have saved for the same "
    "tokens."
)


def timeline_section(run: RunTimeline, metrics: Sequence[Mapping[str, float]]) -> str:
    """Timeline and charts; empty for a run that recorded neither spans nor forwards."""
    if run.bounds_s is None:
        return ""
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in [ABOUT, *run.notes, *_left_out(run)])
    charts = grid(
        [
            ("Where the engines' time went", _decomposition(metrics)),
            ("Bubble, and its part without a running request", _bubble(metrics)),
        ]
    )
    return section("Timeline", notes + _picture(run) + charts)


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
    """The last few steps without a long pause between them; two starts of a run can be days apart."""
    first = len(steps)
    while first > 0 and len(steps) - first < NUM_STEPS_SHOWN:
        step = steps[first - 1]
        if first < len(steps) and steps[first].start_s - step.end_s > step.end_s - step.start_s:
            break
        first -= 1
    return steps[first:]


def _decomposition(metrics: Sequence[Mapping[str, float]]) -> str:
    """Shares of each step's time that sum to one; empty if no speed could be fitted to the run's forwards."""
    rows = [row for row in metrics if "timeline/bubble" in row]
    if not rows:
        return ""
    parts = {Part.SATURATED: [1 - row["timeline/bubble"] for row in rows]}
    parts |= {
        part: [row.get(f"timeline/{part.value}_share", 0.0) for row in rows] for part in Part if part not in parts
    }
    nonzero = {part: shares for part, shares in parts.items() if any(share > 0 for share in shares)}
    return stacked(
        "decomposition",
        [row["step"] + 1 for row in rows],
        {part.value.replace("_", " "): shares for part, shares in nonzero.items()},
        unit="share of the step's time",
        colours=[COLOURS[part] for part in nonzero],
    )


def _bubble(metrics: Sequence[Mapping[str, float]]) -> str:
    series = []
    for metric, label in (("timeline/bubble", "bubble"), ("timeline/idle_share", "idle")):
        rows = [row for row in metrics if metric in row]
        if rows:
            steps, values = [row["step"] + 1 for row in rows], [row[metric] for row in rows]
            series.append(Series(label=label, steps=steps, values=values))
    return lines("bubble", series, unit="share of the step's time") if series else ""
