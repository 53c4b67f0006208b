"""Finds the nodes that a run has lost, and gives their processes other places.

The processes themselves are ended and started by others: engines by `LostEngines`, trainer ranks by `TrainerRestarts`.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from launcher.cluster.placement import Placement
from launcher.cluster.processes import Processes
from launcher.recovery.relocation import Relocation, relocate
from rollout.failures import Place, ProcessLostError

LOOK_EVERY_S = 10.0
"""Interval of looks for lost nodes during a rollout."""


@dataclass(slots=True, kw_only=True)
class LostNodes:
    """The places of a run's processes. In a run on one node nothing here ever changes."""

    running: Processes
    placement: Placement
    """Where the processes belong now."""
    say: Callable[[str], None]
    on_change: Callable[[Placement], None] = lambda placement: None
    num_lost: int = field(default=0, init=False)
    """Nodes that the run has lost since it started."""
    unplaced: str = field(default="", init=False)
    """Why the trainer cannot start again; empty while it has a place."""
    _looked_s: float = field(default=-math.inf, init=False)

    def check_trainer(self) -> None:
        """Look for lost nodes of the trainer, at most once in `LOOK_EVERY_S`.

        Raises:
            ProcessLostError: a node with trainer ranks is gone.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        gone = self.running.gone_nodes()
        if ranks := tuple(rank.rank for rank in self.placement.trainers if rank.node in gone):
            raise ProcessLostError(f"{', '.join(gone)} left the Ray cluster", Place(role="trainer", ranks=ranks))

    def follow(self, suspects: Collection[str] = ()) -> None:
        """Take nodes that are gone out of the placement.

        Nodes of `suspects` that do not answer count as gone, although Ray still knows them; the controller's own node
        never does.
        """
        gone = set() if self.unplaced else set(self.running.gone_nodes(suspects)) - {self.placement.nodes[0]}
        if not gone:
            return
        known = {node.name: node for node in self.running.nodes}
        others = self.running.other_nodes()
        moved = relocate(self.placement, gone, known, others)
        for line in loss_lines(self.placement, moved, gone):
            self.say(line)
        self.num_lost += len(gone)
        if moved.unplaced_ranks:
            self.unplaced = f"no node replaces that of trainer rank(s) {list(moved.unplaced_ranks)}"
            return
        self.placement = moved.placement
        available = known | {node.name: node for node in others}
        nodes = [available[name] for name in self.placement.nodes]
        self.running.use_nodes(nodes, self.placement.num_actors_on, self.placement.history)
        self.on_change(self.placement)


def loss_lines(before: Placement, moved: Relocation, gone: Collection[str]) -> list[str]:
    """One line for each lost node: what becomes of its processes. Pure."""
    return [f"lost {node}: {_effect(node, before, moved)}" for node in sorted(gone, key=before.nodes.index)]


def _effect(node: str, before: Placement, moved: Relocation) -> str:
    ranks = [rank.rank for rank in before.trainers if rank.node == node]
    engines, other = _engines_on(node, before), moved.replaced.get(node, "")
    serve = f"{len(moved.placement.serving)} of {len(before.engines)} serve"
    if other and (given := _engines_on(other, before)):
        return f"{other} replaces it, whose engine(s) {given} leave; {serve}"
    if other:
        return f"{other} replaces it"
    if ranks:
        return f"no node replaces it, and trainer rank(s) {ranks} need one"
    if retired := [number for number in engines if number in moved.placement.retired]:
        return f"engine(s) {retired} are given up; {serve}"
    return f"engine(s) {engines} move to free devices of other nodes"


def _engines_on(node: str, placement: Placement) -> list[int]:
    return [slot.engine_id for slot in placement.serving if slot.node == node]
