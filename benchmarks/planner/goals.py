"""Goals of the planner's benchmark: speed over the synchronous baseline, mean staleness, bubble and planning time.

Each goal of speed names the largest staleness of its scheme; the baseline has none. The largest staleness and the
consumed lengths are no goals: the simulator asserts the first, a test the second.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.harness.record import Goal, Row
from benchmarks.planner.schedules import CORRELATIONS, JUDGED_CORRELATION, PROMPT_SHARE, SCHEMES

WITH_DRAFTS = ("adaptive, overlap 1, head start .2", "adaptive, overlap 2")
"""Schemes with a staleness of at most 2 versions, of which the goal with drafts takes the faster."""
OURS, PAPER = "adaptive, overlap 1", "histopipe"
"""Schemes that are compared with the drafts of their own system; both have a staleness of at most 1 version."""

GOALS: dict[str, tuple[float | None, float | None]] = {
    "histopipe": (1.45, 1.6),
    "adaptive, overlap 1": (1.7, 1.8),
    "adaptive, head start .3": (None, 1.5),
    "adaptive, overlap 1, head start .2": (1.85, 2.15),
    "adaptive, overlap 2": (None, 2.35),
    "flexible": (2.6, 2.6),
}
"""Least speed over `static`: (groups with rank correlation 0.71, responses with 0.9); None: no goal."""


def _chosen(rows: Sequence[Row], scheme: str, **wanted: object) -> list[Row]:
    """Rows of a scheme. Defaults are 64 engines, forecasts `groups` at 0.71 and no drafts."""
    wanted = {"forecasts": "groups", "correlation": PROMPT_SHARE, "engines": 64, "drafts": "none", **wanted}
    of_scheme = [
        row for row in rows if row["what"] == "schedule" and row["scheme"] == scheme and row["trainer_gpus"] == 0
    ]
    return [
        row for row in of_scheme if not row["colocated"] and all(row[key] == value for key, value in wanted.items())
    ]


def _speedup(rows: Sequence[Row], scheme: str, **chosen: object) -> float:
    """Speed of a scheme over `static` without drafts on the same responses, median over seeds."""
    base = {row["seed"]: float(row["step_s"]) for row in _chosen(rows, "static", **{**chosen, "drafts": "none"})}
    return float(np.median([base[row["seed"]] / float(row["step_s"]) for row in _chosen(rows, scheme, **chosen)]))


def _worst(rows: Sequence[Row], scheme: str, figure: str, **chosen: object) -> float:
    return max(float(row[figure]) for row in _chosen(rows, scheme, **chosen))


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Goals of speed, mean staleness, bubble and planning time."""
    by_response: dict[str, object] = {"forecasts": "responses", "correlation": JUDGED_CORRELATION}
    headlines: Sequence[tuple[str, dict[str, object]]] = (("groups at 0.71", {}), ("responses at 0.9", by_response))
    for scheme, bounds in GOALS.items():
        for (name, chosen), bound in zip(headlines, bounds, strict=True):
            if bound is not None:
                yield _at_least(f"{_titled(scheme)} over static, {name}", _speedup(rows, scheme, **chosen), bound)
    overlapped = [_speedup(rows, OURS, forecasts="responses", correlation=correlation) for correlation in CORRELATIONS]
    yield _at_least(f"{_titled(OURS)} over static, worst over correlations", min(overlapped), 1.65)
    for scheme, bound in (("adaptive, head start .3", 0.3), ("adaptive, overlap 1, head start .2", 1.2)):
        stale = _worst(rows, scheme, "mean_staleness", **by_response)
        yield _at_most(f"{scheme}: mean staleness", stale, bound, "versions")
    for name, chosen in headlines:
        yield _at_most(f"flexible, {name}: bubble", _worst(rows, "flexible", "bubble", **chosen), 0.05, "share")
        best = max(_speedup(rows, scheme, drafts="ours", **chosen) for scheme in WITH_DRAFTS)
        paper = _speedup(rows, PAPER, drafts="histospec", **chosen)
        equal = _speedup(rows, OURS, drafts="ours", **chosen)
        staleness = max(SCHEMES[scheme].max_staleness for scheme in WITH_DRAFTS)
        yield _at_least(f"with drafts (staleness up to {staleness}) over static without drafts, {name}", best, 4.0)
        yield _at_least(f"with drafts, {name}: over the paper's stack, both at staleness 1", equal / paper, 1.2)
    slowest = max(float(row["ms"]) for row in rows if row["what"] == "planning")
    yield _at_most("planning 65,536 responses, slowest policy", slowest, 200, "ms")


def _titled(scheme: str) -> str:
    return f"{scheme} (staleness up to {SCHEMES[scheme].max_staleness})"


def _at_least(name: str, value: float, bound: float) -> Goal:
    return Goal(name=name, value=value, bound=bound, direction="at least", unit="x")


def _at_most(name: str, value: float, bound: float, unit: str) -> Goal:
    return Goal(name=name, value=value, bound=bound, direction="at most", unit=unit)
