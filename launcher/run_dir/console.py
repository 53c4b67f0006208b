"""Console output of a run: a line per step, a progress bar in long phases, a table of evaluations before and after.

On a terminal, bars are drawn below the lines. A file or a pipe gets the lines only, without control characters. Metrics
that a step does not have are left out, never shown as zero.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from launcher.run_dir.step_timeline import BETWEEN_STEPS
from rollout.evaluation import Change, EvaluationRow, changes, notes, other_scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A metric in the line of a step."""

    metric: str
    label: str
    form: str
    """Format specification of the value."""


FIELDS = (
    Field(metric="reward/mean", label="reward", form=".3f"),
    Field(metric="response_length/mean", label="length", form=".0f"),
    Field(metric="response_length/clip_ratio", label="cut", form=".1%"),
    Field(metric="rollout_corr/k3_kl", label="k3", form=".1e"),
    Field(metric="rollout_corr/rollout_is_eff_sample_size", label="ESS", form=".4f"),
    Field(metric="actor/entropy", label="entropy", form=".2f"),
    Field(metric="actor/grad_norm", label="grad", form=".2f"),
    Field(metric="history/tokens_per_forward", label="tok/fwd", form=".2f"),
    Field(metric="perf/throughput_tokens_s", label="tok/s", form=".0f"),
)
PHASES = ("rollout", "train", "publish", "switch")
"""Phases whose seconds are a part of the step."""
TROUBLE = {
    "reward/errors": "reward errors",
    "reward/timeouts": "reward time-outs",
    "actor/skipped_updates": "skipped updates",
    "batch/aborted_responses": "aborted responses",
    "refill/missing_groups": "groups with signal missing",
    "history/lost_calls": "lost history calls",
}
"""Counters that are zero in a healthy step; others are shown."""


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The line of `step` (counted from 0) of `num_steps`: its metrics, then seconds by phase."""
    width = len(str(num_steps))
    figures = [f"{field.label} {metrics[field.metric]:{field.form}}" for field in FIELDS if field.metric in metrics]
    seconds = [f"{phase} {metrics[key]:.1f}" for phase in PHASES if (key := f"timing_s/{phase}") in metrics]
    total = f"{metrics['timing_s/step']:.1f} s" if "timing_s/step" in metrics else ""
    before = [
        f"{phase} {metrics[key]:.1f}" for phase in BETWEEN_STEPS if (key := f"timing_s/{phase}_before_step") in metrics
    ]
    trouble = [f"{metrics[key]:.0f} {name}" for key, name in TROUBLE.items() if metrics.get(key, 0) > 0]
    timing = f"{total} ({', '.join(seconds)})" if seconds else total
    parts = [
        f"step {step + 1:>{width}}/{num_steps}",
        *figures,
        timing,
        *_before(before),
        *(f"! {text}" for text in trouble),
    ]
    return "  ".join(part for part in parts if part)


def _before(seconds: list[str]) -> list[str]:
    return [f"before it: {', '.join(seconds)}"] if seconds else []


def before_after_table(rows: Iterable[EvaluationRow]) -> Table:
    """The final table: avg@k and pass@k of the first and the last comparable evaluation, by engine format."""
    table = Table(title="evaluation before and after", title_justify="left")
    for heading in ("set", "engine", "k", "prompts", "after steps"):
        table.add_column(heading)
    for heading in ("avg@k before", "after", "points", "pass@k before", "after", "length before", "after"):
        table.add_column(heading, justify="right")
    for change in changes(rows):
        table.add_row(*_cells(change))
    return table


def _cells(change: Change) -> list[str]:
    before, after = change.before, change.after
    return [
        change.label,
        change.format_label,
        str(before.samples_per_prompt),
        str(before.num_prompts),
        f"{before.step} -> {after.step}",
        f"{before.average:.3f}",
        f"{after.average:.3f}",
        f"{change.points:+.1f}" if change.is_accuracy else "",
        f"{before.passed:.3f}",
        f"{after.passed:.3f}",
        f"{before.mean_length:.0f}",
        f"{after.mean_length:.0f}",
    ]


class RunProgress:
    """Writes the progress of a run to a console, standard output by default."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self._num_steps = num_steps
        # a file or a pipe has no width; without one, rich wraps tables and lines at 80 columns
        self._console = console or Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._warned: set[str] = set()
        """Evaluation sets whose scores are known to have another scale than 0 to 1."""

    def say(self, text: str) -> None:
        """Print one line of plain text."""
        self._end_bar()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str, done: int, total: int) -> None:
        """Move the bar of a phase to `done` of `total`; a finished bar disappears."""
        if not self._console.is_terminal:
            return
        if self._bars is None:
            self._bars = Progress(
                TextColumn("{task.description:>12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
            self._task = self._bars.add_task(name, total=total)
        assert self._task is not None
        self._bars.update(self._task, description=name, completed=done, total=total)
        if done >= total:
            self._end_bar()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step, counted from 0."""
        self.say(step_line(step, self._num_steps, metrics))

    def evaluation(self, rows: Iterable[EvaluationRow]) -> None:
        """Print one line per evaluated set, and one more for the first row of a set with scores outside 0 to 1."""
        rows = list(rows)
        for row in rows:
            k = row.samples_per_prompt
            self.say(
                f"evaluation after {row.step} steps, {row.set_name}/{row.data_source}, {row.format} engine: "
                f"avg@{k} {row.average:.3f}, pass@{k} {row.passed:.3f} over {row.num_prompts} prompts, "
                f"length {row.mean_length:.0f}, cut {row.truncated:.1%}"
            )
        for name, sentence in other_scales(rows).items():
            if name not in self._warned:
                self._warned.add(name)
                self.say(sentence)

    def table(self, rows: Sequence[EvaluationRow]) -> None:
        """Print the final table of evaluations before and after, then a line per set that could not be compared.

        A set of the table with scores outside 0 to 1 has a line, too: it has no gain in points.
        Without evaluations of two steps it prints nothing.
        """
        self._end_bar()
        table = before_after_table(rows)
        if table.row_count:
            self._console.print(table)
        for sentence in notes(rows):
            self.say(sentence)

    def close(self) -> None:
        """Remove the bar, if one is shown."""
        self._end_bar()

    def _end_bar(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None
