"""Finds a trainer that is in a call and does nothing, and says what each rank has done last.

A rank leaves marks while it works (`rollout.progress`). A reader on each node reads those of all its ranks
(`rollout.node_reader`). So the controller asks one process a node every few seconds, while it waits for a call.

A trainer hangs if no rank in the call has left a mark for `timeout_s`. One silent rank is not enough: it may wait for a
peer that works, as most ranks do during an export. If it hangs itself, its peers soon wait for it in a collective. The
error names the ranks that are frozen, or else those that have come least far.

Silence does not count

* between two answers of the node's reader that are further apart than usual: the machine may have been suspended;
* while a rank reads or writes files, as long as bytes move or it waits for a disk;
* while a rank hands over a bucket, because it may wait for an engine. `publish.timeout_s` bounds this.

Must not import torch: it runs in the controller's process.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import ray

from rollout.failures import brief, ranges
from rollout.node_reader import start_reader
from rollout.processes import ProcessId
from rollout.progress import Seen

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Most seconds between two looks at the ranks."""
READER_TIMEOUT_S = 60.0
"""A reader that has not answered for so long is replaced."""
ANSWER_S = 30.0
"""Most seconds for which a report waits for readers."""
MOVED_BYTES = 1 << 20
"""Bytes of files that count as progress; less than that also moves while a rank hangs."""
_MOST_SHOWN = 6
"""Most different marks in a report."""


@dataclass(slots=True, kw_only=True)
class _Node:
    """A node with ranks, and its reader."""

    id: str
    ranks: tuple[int, ...]
    reader: ray.actor.ActorHandle
    name: str = ""
    """Host name, once the reader has answered."""
    asked: ray.ObjectRef | None = None
    asked_s: float = 0.0
    answered_s: float = 0.0
    """When the last answer came, by the watch's clock."""


@dataclass(slots=True)
class _Rank:
    """What is known of a rank."""

    seen: Seen
    """The newest look."""
    num_bytes: int = 0
    """Bytes of files when it last made progress."""
    silent_s: float = 0.0

    def follow(self, seen: Seen, waited_s: float) -> None:
        moved = seen.num_bytes - self.num_bytes >= MOVED_BYTES
        may_wait = seen.state != psutil.STATUS_STOPPED and (seen.kind == "handover" or seen.waits_for_disk)
        if seen.num_marks != self.seen.num_marks or moved or may_wait:
            self.num_bytes, self.silent_s = seen.num_bytes, 0.0
        else:
            self.silent_s += waited_s
        self.seen = seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Who hangs, for the message of an error."""

    suspects: tuple[int, ...]
    node: str
    """Of the first suspect."""
    text: str
    """The last marks of the suspects, then of the others."""


@dataclass(slots=True)
class RankWatch:
    """Watches the ranks of one trainer; `begin` and `hangs` mutate."""

    processes: Sequence[ProcessId]
    timeout_s: float
    """Longest time without a mark of any rank, during a call."""
    clock: Callable[[], float] = time.monotonic
    look_every_s: float = field(init=False)
    """Call `hangs` at least this often during a call."""
    _nodes: list[_Node] = field(init=False)
    _ranks: dict[int, _Rank] = field(default_factory=dict, init=False)
    _looked_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.look_every_s = min(LOOK_EVERY_S, self.timeout_s / 4)
        by_node: dict[str, list[int]] = {}
        for rank, process in enumerate(self.processes):
            if process.page >= 0:
                by_node.setdefault(process.node_id, []).append(rank)
        self._nodes = [_Node(id=node, ranks=tuple(ranks), reader=start_reader(node)) for node, ranks in by_node.items()]

    def begin(self) -> None:
        """A call begins: nothing is known of its progress."""
        self._looked_s = self.clock()
        self._ranks = {}
        for node in self._nodes:
            node.answered_s = self._looked_s

    def hangs(self, busy: Collection[int]) -> bool:
        """Whether all ranks that are busy with the call have been silent for too long. Never waits."""
        now = self.clock()
        if now - self._looked_s < self.look_every_s:
            return False
        self._looked_s = now
        self._read_answers()
        self._ask()
        silences = [self._ranks[rank].silent_s if rank in self._ranks else 0.0 for rank in busy]
        return min(silences, default=0.0) > self.timeout_s

    def report(self, busy: Collection[int]) -> Report | None:
        """Who of the busy ranks the others wait for; None if nothing is known of them."""
        self._read_answers()  # perhaps of a question from the call before
        self._ask()
        asked = [node.asked for node in self._nodes if node.asked is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        self._read_answers()
        seen = {rank: self._ranks[rank].seen for rank in busy if rank in self._ranks}
        if not seen:
            return None
        suspects = least_far(seen)
        names = {rank: node.name for node in self._nodes for rank in node.ranks}
        return Report(suspects=suspects, node=names[suspects[0]], text=marks_text(seen, suspects, names))

    def close(self) -> None:
        """End the readers."""
        for node in self._nodes:
            ray.kill(node.reader, no_restart=True)

    def _ask(self) -> None:
        for node in self._nodes:
            if node.asked is None:
                node.asked = node.reader.read.remote([self.processes[rank] for rank in node.ranks])
                node.asked_s = self.clock()

    def _read_answers(self) -> None:
        asked = [node.asked for node in self._nodes if node.asked is not None]
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        answered = set(done)
        for node in self._nodes:
            if node.asked is not None and node.asked in answered:
                self._read(node, node.asked)
            elif node.asked is not None and self.clock() - node.asked_s > READER_TIMEOUT_S:
                self._replace_reader(node, f"has not answered for {READER_TIMEOUT_S:.0f} s")

    def _read(self, node: _Node, answer: ray.ObjectRef) -> None:
        try:
            node.name, of_ranks = ray.get(answer)
        except ray.exceptions.RayError as error:
            if self.clock() - node.asked_s > READER_TIMEOUT_S:
                self._replace_reader(node, brief(error))
            return
        node.asked = None
        now = self.clock()
        waited_s, node.answered_s = min(now - node.answered_s, 2 * self.look_every_s), now
        for rank, seen in zip(node.ranks, of_ranks, strict=True):
            if seen is None:  # it has ended; its call says so
                self._ranks.pop(rank, None)
            elif rank in self._ranks:
                self._ranks[rank].follow(seen, waited_s)
            else:
                self._ranks[rank] = _Rank(seen, seen.num_bytes)

    def _replace_reader(self, node: _Node, why: str) -> None:
        _log.warning(
            "the reader of the trainer ranks' progress on node %s %s; it is replaced", node.name or node.id, why
        )
        ray.kill(node.reader, no_restart=True)
        node.reader, node.asked = start_reader(node.id), None


def least_far(seen: Mapping[int, Seen]) -> tuple[int, ...]:
    """The ranks that the others wait for: those that are frozen, or else those that have come least far. Pure.

    All ranks make the same calls, so marks of the same call can be compared. In a pipeline, the stage that has come
    least far may itself wait for a neighbour.
    """
    frozen = tuple(rank for rank, each in sorted(seen.items()) if each.state == psutil.STATUS_STOPPED)
    if frozen:
        return frozen
    least = min((each.num_calls, each.in_call) for each in seen.values())
    return tuple(rank for rank, each in sorted(seen.items()) if (each.num_calls, each.in_call) == least)


def marks_text(seen: Mapping[int, Seen], suspects: Collection[int], nodes: Mapping[int, str]) -> str:
    """The last mark of every rank: one phrase for ranks that have the same, suspects first. Pure."""
    newest = max(each.num_calls for each in seen.values())
    by_mark: dict[tuple[bool, str], list[int]] = {}
    for rank, each in sorted(seen.items()):
        before = "" if each.num_calls == newest else "the call before, "
        by_mark.setdefault((rank not in suspects, f"at `{before}{each.text}` ({each.state})"), []).append(rank)
    shown = [
        f"rank {ranges(ranks)} on {nodes[ranks[0]]}{' and others' if len({nodes[r] for r in ranks}) > 1 else ''} {mark}"
        for (_, mark), ranks in sorted(by_mark.items())
    ]
    return "; ".join([*shown[:_MOST_SHOWN], *([f"{len(shown) - _MOST_SHOWN} more marks"] * (len(shown) > _MOST_SHOWN))])
