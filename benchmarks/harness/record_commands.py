"""Commands of records as they are today: benchmarks have moved since some records were written.

A record keeps the command that measured it, which works at the commit of its rows. Its page also shows the command
with the module names of today. Add a line to `MOVED` when a benchmark moves.
"""

import re
from collections.abc import Mapping

MOVED: Mapping[str, str] = {
    "benchmarks.baselines.arctic": "benchmarks.drafting.baselines.arctic",
    "benchmarks.draft_trees": "benchmarks.drafting.trees",
    "benchmarks.history_example": "benchmarks.learning.example_epochs",
    "benchmarks.history_soak": "benchmarks.drafting.store_soak",
    "benchmarks.mismatch": "benchmarks.learning.mismatch",
    "benchmarks.planner_engines": "benchmarks.planner.real_engines",
    "benchmarks.publish_delta": "benchmarks.publish.delta",
    "benchmarks.quickstart": "benchmarks.learning.quickstart",
    "benchmarks.recorded_run": "benchmarks.planner.recorded_run",
    "benchmarks.sampling": "benchmarks.rollout.sampling",
    "benchmarks.soak": "benchmarks.learning.soak",
    "benchmarks.step_time": "benchmarks.rollout.step_time",
}
"""Module names in records, and the names of the same modules today."""
_MODULE = re.compile(r"\bbenchmarks(?:\.[a-z_]\w*)+")


def of_today(text: str) -> str:
    """A command or sentence with today's names of moved modules."""
    return _MODULE.sub(lambda found: MOVED.get(found[0], found[0]), text)
