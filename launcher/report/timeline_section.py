"""The report's section on time: timeline of all actors, and the bubble of the engines' time."""

import html
from collections.abc import Sequence

from launcher.report.charts import Line, line_chart, stacked_chart
from launcher.report.chrome_trace import num_steps_shown
from launcher.report.html import grid, section
from launcher.report.lanes import PART_COLOURS, PART_LABELS
from launcher.report.metric_table import MetricTable
from launcher.report.run_timeline import RunTimeline, Step, begins_start
from launcher.report.timeline_plot import MAX_ENGINES, engine_rows
from rollout.tracing.timeline import Part

NUM_STEPS_SHOWN = 3
ABOUT = (
    "A saturated engine runs as many requests as the engines have run at most since the last start. The bubble is the "
    "time that saturated engines would have saved for the same tokens."
)


def timeline_section(run: RunTimeline, metrics: MetricTable) -> str:
    """Timeline and charts; empty for a run that recorded neither spans nor forwards."""
    if run.bounds_s is None:
        return ""
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in [ABOUT, *run.notes, *_left_out(run)])
    charts = grid(
        [
            ("Where the engines' time went", "share of the step's time", _decomposition(metrics)),
            ("Bubble, and its part without a running request", "share of the step's time", _bubble(metrics)),
        ]
    )
    return section("Timeline", notes + _picture(run) + charts)


def _left_out(run: RunTimeline) -> list[str]:
    shown = num_steps_shown(run)
    extent = "the whole run" if shown == run.num_steps else f"the newest {shown} of {run.num_steps} steps"
    about_file = f"timeline.json holds {extent} and opens in ui.perfetto.dev."
    notes = [about_file]
    if drawn := last_steps(run.steps):
        num_at_work = len(run.at_work(drawn[0].start_s, drawn[-1].end_s))
        if num_at_work > MAX_ENGINES:
            notes.append(f"The picture shows the first {MAX_ENGINES} of {num_at_work} engines.")
        if absent := len(run.forwards) - num_at_work:
            notes.append(f"{absent} of {len(run.forwards)} engines ran no forward in these steps and have no lane.")
    return notes


def _picture(run: RunTimeline) -> str:
    shown = last_steps(run.steps)
    if not shown:
        return ""
    title = f"The last {len(shown)} steps" if len(shown) > 1 else "The last step"
    return f'<figure class="full"><figcaption>{title}</figcaption>{engine_rows(run, shown)}</figure>'


def last_steps(steps: Sequence[Step]) -> Sequence[Step]:
    """The last few steps of the last start of the run; two starts can be days apart."""
    first = len(steps)
    while first > 0 and len(steps) - first < NUM_STEPS_SHOWN:
        if first < len(steps) and begins_start(steps[first - 1], steps[first]):
            break
        first -= 1
    return steps[first:]


def _decomposition(metrics: MetricTable) -> str:
    """Shares of each step's time that sum to one; empty if no speed could be fitted to the run's forwards."""
    numbers, bubble = metrics.column("timeline/bubble")
    steps = metrics.filled("step")[numbers] + 1
    parts = {Part.SATURATED: 1 - bubble}
    parts |= {part: metrics.filled(f"timeline/{part.value}_share")[numbers] for part in Part if part not in parts}
    return stacked_chart(
        [
            Line(label=PART_LABELS[part], at=steps, values=shares, colour=PART_COLOURS[part])
            for part, shares in parts.items()
            if (shares > 0).any()
        ]
    )


def _bubble(metrics: MetricTable) -> str:
    lines = []
    for metric, label in (("timeline/bubble", "bubble"), ("timeline/idle_share", "idle")):
        numbers, values = metrics.column(metric)
        if len(numbers):
            lines.append(Line(label=label, at=metrics.filled("step")[numbers] + 1, values=values, hint=metric))
    return line_chart(lines)
