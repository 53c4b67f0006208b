"""Kills processes of any node of the Ray cluster, and waits for their end.

Ray's own `kill` returns before a process has ended, and its device memory is free only then. The stacks of all
processes are written before the first one is killed, because its death would change what its peers do.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from history.ray_wait import wait_for_all
from rollout.failures import brief
from rollout.processes import ProcessId, kill_processes
from rollout.stacks import write_stacks

_log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 30.0
"""Time for a task to start on the node of a process and to end it."""
STACKS_TIMEOUT_S = 60.0
"""Time for a task to start on a node and to write the stacks of its processes."""

_kill = ray.remote(num_cpus=0, max_retries=0)(kill_processes)
_write = ray.remote(num_cpus=0, max_retries=0)(write_stacks)


def kill_on_nodes(processes: Sequence[ProcessId], *, stacks: bool) -> tuple[str, ...]:
    """Kill processes and their children by a task on each node; returns when they have ended.

    A node that is gone, or does not answer in `KILL_TIMEOUT_S`, is no error. `stacks`: the stacks of all processes are
    written first (`rollout.stacks`); returns the folders with them.
    """
    by_node: dict[str, list[ProcessId]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)
    folders = _write_stacks(by_node) if stacks else ()
    killing = [_kill.options(scheduling_strategy=_on(node)).remote(group) for node, group in by_node.items()]
    wait_for_all(killing, timeout_s=KILL_TIMEOUT_S)
    return folders


def _write_stacks(by_node: Mapping[str, Sequence[ProcessId]]) -> tuple[str, ...]:
    """Write the stacks of processes, by Ray's id of their node; returns the folders that contain those of a node."""
    when = time.strftime("%Y%m%dT%H%M%S")
    writing = [_write.options(scheduling_strategy=_on(node)).remote(group, when) for node, group in by_node.items()]
    done, late = wait_for_all(writing, timeout_s=STACKS_TIMEOUT_S)
    if late:
        _log.warning("%d node(s) had not written all stacks after %.0f s", len(late), STACKS_TIMEOUT_S)
    folders: set[str] = set()
    for ref in done:
        try:
            files: tuple[str, ...] = ray.get(ref)
        except ray.exceptions.RayError as error:  # the processes are killed all the same
            _log.warning("a node has written no stacks: %s", brief(error))
            continue
        folders |= {str(Path(file).parent.parent) for file in files}
    return tuple(sorted(folders))


def _on(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)
