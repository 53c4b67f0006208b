"""Nodes of the joined Ray cluster: which are alive, which answer, and the resources that they tell."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from history.ray_wait import wait_for_all
from launcher.cluster.node import NodeResources, node_resources
from rollout.failures import DeadlineError
from rollout.processes import ALL_DEVICES

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 120.0
"""For which a node may take to tell its resources, or to give its bundle."""
SILENCE_S = 30.0
"""For which a node that is under suspicion may take to run an empty task."""
SPARE = "spare"
"""Label of a spare node of a SLURM job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AliveNode:
    """A node that is alive, as Ray reports it."""

    name: str
    node_id: str
    labels: Mapping[str, str]

    @property
    def is_spare(self) -> bool:
        """Whether a SLURM job keeps the node for the loss of another one."""
        return SPARE in self.labels


def alive_nodes() -> list[AliveNode]:
    """Nodes that are alive."""
    return [
        AliveNode(name=str(row["NodeName"]), node_id=str(row["NodeID"]), labels=dict(row.get("Labels") or {}))
        for row in ray.nodes()
        if row["Alive"]
    ]


def alive_in_order() -> list[AliveNode]:
    """Nodes that are alive: the command's own first, the others by name, spare nodes last.

    Raises:
        RuntimeError: two nodes have the same name.
    """
    here = ray.get_runtime_context().get_node_id()
    alive = sorted(alive_nodes(), key=lambda node: (node.node_id != here, node.is_spare, natural_order(node.name)))
    names = [node.name for node in alive]
    if len(set(names)) < len(names):
        raise RuntimeError(f"two nodes of the Ray cluster have the same name: {names}; set `ray start --node-name`")
    return alive


def natural_order(name: str) -> list[tuple[int, str]]:
    """Key that sorts `node2` before `node10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def ask_nodes(alive: Sequence[AliveNode]) -> tuple[NodeResources, ...]:
    """Resources of these nodes, in their order.

    Raises:
        DeadlineError: a node did not answer in `ANSWER_TIMEOUT_S`.
    """
    answers = _answers(alive)
    if silent := [node.name for node, answer in zip(alive, answers, strict=True) if answer is None]:
        raise DeadlineError(
            f"the controller waited {ANSWER_TIMEOUT_S:.0f} s for {', '.join(silent)} to tell their resources; see the "
            "log of Ray there"
        )
    return tuple(answer for answer in answers if answer is not None)


def other_nodes(names: Collection[str]) -> tuple[NodeResources, ...]:
    """Nodes of the joined Ray cluster that are alive, answer and are not among `names`.

    A node that does not answer is left out with a warning: it may have died together with the node that is to be
    replaced, and then another one replaces that.
    """
    nodes = [node for node in alive_in_order() if node.name not in names]
    answers = _answers(nodes)
    if silent := [node.name for node, answer in zip(nodes, answers, strict=True) if answer is None]:
        _log.warning("%s did not tell their resources and are not used", ", ".join(silent))
    return tuple(answer for answer in answers if answer is not None)


def _answers(nodes: Sequence[AliveNode]) -> list[NodeResources | None]:
    """Resources of these nodes, in their order; None of one that died, or did not answer in `ANSWER_TIMEOUT_S`."""
    ask = ray.remote(node_resources)
    answers = [
        ask.options(
            num_cpus=0,
            runtime_env={"env_vars": ALL_DEVICES},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        ).remote()
        for node in nodes
    ]
    done, _ = wait_for_all(answers, timeout_s=ANSWER_TIMEOUT_S)
    told = set(done)
    return [_answer(ref, node) if ref in told else None for node, ref in zip(nodes, answers, strict=True)]


def _answer(ref: ray.ObjectRef, node: AliveNode) -> NodeResources | None:
    """Resources with what Ray knows of their node; None, and a warning, if the node could not tell them."""
    try:
        resources: NodeResources = ray.get(ref)
    except ray.exceptions.RayError as error:
        _log.warning("%s cannot tell its resources: %s", node.name, error)
        return None
    return replace(resources, name=node.name, rack=node.labels.get("rack", ""), block=node.labels.get("block", ""))


def silent_nodes(node_ids: Mapping[str, str]) -> list[str]:
    """Names of nodes that do not run a task within `SILENCE_S`; `node_ids` has Ray's id of each.

    Ray itself needs longer to miss a node whose network is cut.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(_do_nothing)
    asking = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(): name
        for name, node_id in node_ids.items()
    }
    done, silent = wait_for_all(list(asking), timeout_s=SILENCE_S)
    return [asking[ref] for ref in silent] + [asking[ref] for ref in done if _fails(ref)]


def _do_nothing() -> None:
    """The empty task."""


def _fails(ref: ray.ObjectRef) -> bool:
    try:
        ray.get(ref)
    except ray.exceptions.RayError:
        return True
    return False
