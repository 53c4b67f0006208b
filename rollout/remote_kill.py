"""Kills processes of any node of the Ray cluster, and waits for their end.

Ray's own `kill` returns before a process has ended, and its device memory is free only then.
"""

from collections.abc import Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollout.processes import ProcessId, kill_process

KILL_TIMEOUT_S = 30.0
"""Time for a task to start on the node of a process and to end it."""

_kill = ray.remote(num_cpus=0, max_retries=0)(kill_process)


def kill_on_nodes(processes: Sequence[ProcessId], *, stacks: bool) -> None:
    """Kill processes and their children by a task on each one's node; returns when they have ended.

    A node that is gone, or does not answer in `KILL_TIMEOUT_S`, is no error. `stacks` as in `kill_process`.
    """
    killing = [
        _kill.options(scheduling_strategy=NodeAffinitySchedulingStrategy(process.node_id, soft=False)).remote(
            process, stacks=stacks
        )
        for process in processes
    ]
    if killing:
        ray.wait(killing, num_returns=len(killing), timeout=KILL_TIMEOUT_S)
