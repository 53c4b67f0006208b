"""The example's reward function, whose calls take long enough to be hit.

A call waits for a process of its own, by which it is seen from outside that the call is under way.
"""

import subprocess

from rollout.rewards import exact

CALL_S = 0.5


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: object = None
) -> dict[str, float]:
    """The score of `rollout.rewards.exact`, after `CALL_S`."""
    subprocess.run(["sleep", str(CALL_S)], check=True)
    return exact.compute_score(data_source, solution_str, ground_truth, extra_info)
