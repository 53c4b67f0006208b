"""What the rows of all runs say: seconds to the fixed accuracy, differences between arms, and goals.

Accuracies of a run are noisy. So they are first fitted by the nearest sequence that never falls (isotonic regression by
pooling neighbours). The run reaches the accuracy where straight lines between the fitted points first reach it.

Arms are compared seed by seed with 95 % intervals. Every bound below was fixed before the first measured run.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.end_to_end.arms import ACCURACY, ARMS, BASE, NO_HISTORY, OTHER_HISTORY, OURS, PLAIN_LOOP, TRL
from benchmarks.harness.paired import Difference
from benchmarks.harness.record import Goal, Row

LAST_EVALUATIONS = 2
"""Their mean is the accuracy at the end of a run."""
ROLLOUT_SHARE = (0.7, 0.9)
"""Range of the share of its steps that the base spends in rollout; outside of it the benchmark measures nothing."""


def check_regime(rows: Sequence[Row]) -> None:
    """Refuse sizes for which rollout is not the greater part of the base's steps.

    Raises:
        SystemExit: the share of a run of the base is out of range.
    """
    least, most = ROLLOUT_SHARE
    for row in rows:
        if (row["what"], row["arm"]) == ("run", BASE) and not least <= (share := float(row["rollout_share"])) <= most:
            raise SystemExit(
                f"{BASE}, seed {row['seed']}: {share:.0%} of its steps are rollout, not {least:.0%} to {most:.0%}; "
                "change the sizes in benchmarks/end_to_end/model.py or chains.py, and begin anew"
            )


def never_falling(values: Sequence[float]) -> list[float]:
    """The sequence nearest in squares to `values` that never falls."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, m), (second, n) = pools[-2:]
            pools[-2:] = [((first * m + second * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def seconds_to(accuracy: float, points: Sequence[tuple[float, float]]) -> float:
    """Seconds at which a run reaches an accuracy, from its (seconds, accuracy) pairs; infinite if it does not."""
    ordered = sorted(points)
    times = [seconds for seconds, _ in ordered]
    fitted = never_falling([value for _, value in ordered])
    for number, value in enumerate(fitted):
        if value >= accuracy:
            if number == 0:
                return times[0]
            share = (accuracy - fitted[number - 1]) / (value - fitted[number - 1])
            return times[number - 1] + share * (times[number] - times[number - 1])
    return math.inf


def points_of(rows: Sequence[Row], arm: str, seed: int) -> list[tuple[float, float]]:
    """(seconds, accuracy) of the evaluations of a run."""
    return [
        (float(row["seconds"]), float(row["accuracy"]))
        for row in rows
        if (row["what"], row.get("arm"), row.get("seed")) == ("evaluation", arm, seed)
    ]


def completed(whole: Row, points: Sequence[Row]) -> Row:
    """A run's row with what its evaluations say; without `seconds_to_accuracy` if it did not reach the accuracy."""
    pairs = [(float(row["seconds"]), float(row["accuracy"])) for row in points]
    reached = seconds_to(ACCURACY, pairs)
    last = [accuracy for _, accuracy in sorted(pairs)][-LAST_EVALUATIONS:]
    return {
        **whole,
        "accuracy_first": round(min(pairs)[1], 4),
        "accuracy_last": round(statistics.fmean(last), 4),
        **({"seconds_to_accuracy": round(reached, 1)} if math.isfinite(reached) else {}),
    }


def differences(rows: Sequence[Row]) -> Iterator[Row]:
    """Each arm against each reference, over the seeds that both have: speeds as ratios, accuracy in points."""
    for other in (BASE, PLAIN_LOOP, TRL, NO_HISTORY):
        for arm in ARMS:
            pairs = list(_pairs(rows, arm, other))
            if arm == other or len(pairs) < 2:
                continue
            row: dict[str, str | int | float | bool] = {
                "what": "difference",
                "arm": arm,
                "against": other,
                "seeds": len(pairs),
                "reached": sum("seconds_to_accuracy" in mine for mine, _ in pairs),
            }
            row |= _interval("step_speed", [float(base["step_s"]) / float(mine["step_s"]) for mine, base in pairs])
            points = [100 * (float(mine["accuracy_last"]) - float(base["accuracy_last"])) for mine, base in pairs]
            row |= _interval("accuracy_points", points)
            if all("seconds_to_accuracy" in each for pair in pairs for each in pair):
                speeds = [
                    float(base["seconds_to_accuracy"]) / float(mine["seconds_to_accuracy"]) for mine, base in pairs
                ]
                row |= _interval("speed", speeds)
            yield row


def _pairs(rows: Sequence[Row], arm: str, other: str) -> Iterator[tuple[Row, Row]]:
    runs = {(row["arm"], row["seed"]): row for row in rows if row["what"] == "run"}
    for name, seed in sorted(runs, key=lambda key: int(key[1])):
        if name == arm and (other, seed) in runs:
            yield runs[arm, seed], runs[other, seed]


def _interval(name: str, values: Sequence[float]) -> dict[str, float]:
    difference = Difference.of(values)
    low, high = difference.interval
    return {name: round(difference.mean, 4), f"{name}_low": round(low, 4), f"{name}_high": round(high, 4)}


_SPEEDS = ((BASE, 1.5), (TRL, 2.0), (PLAIN_LOOP, 1.0))
"""Least speed of `OURS` over others: lower end of the interval. Over the plain loop it is to be above 1."""


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Goals from the rows of `differences`; a speed that some run never reached counts as 0."""
    found = {(row["arm"], row["against"]): row for row in rows if row["what"] == "difference"}
    for other, bound in _SPEEDS:
        if (row := found.get((OURS, other))) is not None:
            name = f"{OURS} over {other}: speed to the accuracy, lower end"
            low = float(row.get("speed_low", 0.0))
            yield Goal(name=name, value=low, bound=bound, direction="at least", unit="x")
    for (arm, against), row in found.items():
        if against == BASE and ARMS[str(arm)].peer is None:
            name = f"{arm}: accuracy against {BASE}, upper end"
            high = float(row["accuracy_points_high"])
            yield Goal(name=name, value=high, bound=0.0, direction="at least", unit="points")
    if (row := found.get((OTHER_HISTORY, NO_HISTORY))) is not None:
        name = f"{OTHER_HISTORY} over {NO_HISTORY}: speed of a step, lower end"
        yield Goal(name=name, value=float(row["step_speed_low"]), bound=1.0, direction="at most", unit="x")
