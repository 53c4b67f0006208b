"""What the rows of all runs say: seconds to the fixed accuracy, differences between arms, and goals.

Accuracies of a run are noisy. So they are first fitted by the nearest sequence that never falls (isotonic regression by
pooling neighbours). The run reaches the accuracy where straight lines between the fitted points first reach it.

Arms are compared seed by seed with 95 % intervals; speeds by their logarithms, so means are geometric. Every bound
below was fixed before the first measured run.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.end_to_end.arms import (
    ACCURACY,
    ARMS,
    BASE,
    NO_HISTORY,
    OTHER_HISTORY,
    OURS,
    PLAIN_LOOP,
    SHARED,
    TRL,
)
from benchmarks.harness.paired import Difference
from benchmarks.harness.record import Goal, Row

LAST_EVALUATIONS = 2
"""Their mean is the accuracy at the end of a run."""
ROLLOUT_SHARE = (0.7, 0.9)
"""Range of the share of its steps that the base spends in rollout; outside of it the benchmark measures nothing."""


def check_regime(rows: Sequence[Row], *, fewest: int = 1) -> None:
    """Refuse sizes for which rollout is not the greater part of the base's steps, judged on the mean over its seeds.

    With fewer than `fewest` seeds nothing is judged.

    Raises:
        SystemExit: the mean share is out of range.
    """
    least, most = ROLLOUT_SHARE
    shares = [float(row["rollout_share"]) for row in rows if (row["what"], row["arm"]) == ("run", BASE)]
    if len(shares) >= max(1, fewest) and not least <= (share := statistics.fmean(shares)) <= most:
        raise SystemExit(
            f"{BASE}: {share:.0%} of its steps are rollout, not {least:.0%} to {most:.0%}; "
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
    for other in (BASE, SHARED, PLAIN_LOOP, TRL, OTHER_HISTORY):
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
            row |= _ratio("step_speed", [float(base["step_s"]) / float(mine["step_s"]) for mine, base in pairs])
            points = [100 * (float(mine["accuracy_last"]) - float(base["accuracy_last"])) for mine, base in pairs]
            row |= _interval("accuracy_points", points)
            if all("seconds_to_accuracy" in each for pair in pairs for each in pair):
                speeds = [
                    float(base["seconds_to_accuracy"]) / float(mine["seconds_to_accuracy"]) for mine, base in pairs
                ]
                row |= _ratio("speed", speeds)
            yield row


def _pairs(rows: Sequence[Row], arm: str, other: str) -> Iterator[tuple[Row, Row]]:
    runs = {(row["arm"], row["seed"]): row for row in rows if row["what"] == "run"}
    for name, seed in sorted(runs, key=lambda key: int(key[1])):
        if name == arm and (other, seed) in runs:
            yield runs[arm, seed], runs[other, seed]


def _interval(name: str, values: Sequence[float]) -> dict[str, float]:
    return {key: round(value, 4) for key, value in _ends(name, values)}


def _ends(name: str, values: Sequence[float]) -> list[tuple[str, float]]:
    difference = Difference.of(values)
    low, high = difference.interval
    return [(name, difference.mean), (f"{name}_low", low), (f"{name}_high", high)]


def _ratio(name: str, values: Sequence[float]) -> dict[str, float]:
    return {key: round(math.exp(value), 4) for key, value in _ends(name, [math.log(value) for value in values])}


_SPEEDS = ((BASE, 1.5), (SHARED, 1.0), (TRL, 2.0), (PLAIN_LOOP, 1.0))
"""Least speed of `OURS` over others: lower end of the interval. Over those with both cores it is to be above 1."""
ACCURACY_LOSS = 3.0
"""Points by which no arm of this project may be worse than the base: lower end of the interval."""
CONTROL = 1 / 1.05
"""Least speed of drafts from no history over drafts from another prompt's history, which must not help."""


def goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Goals from the rows of `differences`, each the lower end of an interval.

    A speed that some run never reached counts as 0. So does one that was not measured, and an accuracy that was not
    measured counts as 100 points lost.
    """
    found = {(row["arm"], row["against"]): row for row in rows if row["what"] == "difference"}

    def low(arm: str, against: str, field: str, absent: float) -> float:
        return float(found.get((arm, against), {}).get(f"{field}_low", absent))

    for other, bound in _SPEEDS:
        name = f"{OURS} over {other}: speed to the accuracy, lower end"
        yield Goal(name=name, value=low(OURS, other, "speed", 0.0), bound=bound, direction="at least", unit="x")
    for arm in ARMS:
        if arm != BASE and ARMS[arm].peer is None:
            name = f"{arm}: accuracy against {BASE}, lower end"
            value = low(arm, BASE, "accuracy_points", -100.0)
            yield Goal(name=name, value=value, bound=-ACCURACY_LOSS, direction="at least", unit="points")
    name = f"{NO_HISTORY} over {OTHER_HISTORY}: speed of a step, lower end"
    value = low(NO_HISTORY, OTHER_HISTORY, "step_speed", 0.0)
    yield Goal(name=name, value=value, bound=CONTROL, direction="at least", unit="x")
