"""The Ray cluster of a command: starting or joining it, and a bundle on each of its nodes.

In a joined cluster the processes of a run have one Ray placement group with a bundle on every node of the run. A bundle
reserves a logical CPU for each process and all GPUs of its node, so the devices of a node can be named. A node that
others use partly is refused.
"""

import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from history.own_files import is_private_folder, make_private_folder
from launcher.cluster.alive_nodes import ANSWER_TIMEOUT_S, alive_in_order, alive_nodes, ask_nodes, silent_nodes
from launcher.cluster.node import RAY_FOLDER, RAY_SETTINGS, RAY_START_TRIES, NodeResources
from launcher.cluster.ray_limits import await_listener, end_ray, kill_families, limited_start
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError, Terminated
from rollout.failures import DeadlineError, ProcessLostError
from rollout.processes import children

_log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 600.0
"""Longest wait for nodes to join Ray."""
NODE_ID = "ray.io/node-id"
"""Ray's label of a node's id."""
_UNREGISTERED = "No node info found"
"""In the message of Ray (2.60: `get_node_to_connect_for_driver`) if no node of the cluster has registered yet."""
_init = partial(ray.init, log_to_driver=False, logging_level="ERROR", namespace="megatron_rl")
_POLL_S = 0.5
TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables with the secret that Ray's services ask for, and with the path of a file that holds it."""
_LONGEST = 107 - len("/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store")
"""Bytes of Ray's folder: paths of sockets have at most 107."""
_SESSIONS = ".mrl"
"""Folder of the sessions of local Rays. It is short, and tells these Rays from those that a person has started."""
_OF_RUN = re.compile(rf".*/(?:{re.escape(_SESSIONS)}|{RAY_FOLDER}\d+-\d+-\w{{8}}/ray)")
"""Ray's folder in the Ray of a run, which it has started itself on this machine or on the nodes of a SLURM job."""


def start_ray(cluster: ClusterConfig, *, num_actors: int) -> None:
    """Join or start Ray; if the start fails or is interrupted, end Ray's processes.

    Raises:
        Terminated: SIGTERM came during the start. Ray installs its own handler until it has started.
        ConfigError: no Ray cluster answers at `cluster.address`, or a local one has no folder for its sockets.
        DeadlineError: Ray's own processes did not answer in time, or fewer than `cluster.min_nodes` joined.
    """
    local = cluster.address == "local"
    for tries_left in reversed(range(RAY_START_TRIES if local else 1)):
        try:
            _start_or_join(cluster, num_actors=num_actors)
            break
        except DeadlineError as error:
            if not tries_left:
                raise
            _log.warning("%s; Ray is started again", error)
    if not local:
        _wait_for_nodes(cluster.min_nodes)


def _start_or_join(cluster: ClusterConfig, *, num_actors: int) -> None:
    """One try of `start_ray`, which does not wait for other nodes."""
    local = cluster.address == "local"
    on_termination = signal.getsignal(signal.SIGTERM)
    before = children(psutil.Process())
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # an error is reported once, to its waiting caller
    if local and not any(name in os.environ for name in TOKEN):
        os.environ[TOKEN[0]] = secrets.token_hex(32)  # else Ray writes one for all runs into the home directory
    try:
        if local:
            with _on_loopback(), limited_start():
                _init(
                    address="local",
                    _temp_dir=str(_local_folder()),
                    include_dashboard=False,
                    num_cpus=num_actors,
                    object_store_memory=cluster.object_store_bytes,
                    _system_config=RAY_SETTINGS,
                )
        else:
            _join(cluster.address)
    except BaseException as error:  # after a failed start Ray does not end its own processes
        end_ray()
        kill_families([child for child in children(psutil.Process()) if child not in before])
        if isinstance(error, SystemExit):
            raise Terminated from error
        if "timed out during startup" in str(error):
            raise DeadlineError(
                f"Ray did not start in time; end other programs of this machine and try again: {error}"
            ) from error
        raise
    finally:
        if threading.current_thread() is threading.main_thread() and on_termination is not None:
            signal.signal(signal.SIGTERM, on_termination)


def _local_folder() -> Path:
    """Folder for the sessions of this user's local Rays, in one that only this user can enter.

    Ray opens its own folders to all users, whatever the umask: each could take the place of its sockets. As in Ray,
    RAY_TMPDIR goes before TMPDIR and `/tmp`, and is made if it is missing. A job's TMPDIR may be missing or too long.

    Raises:
        ConfigError: no place has room for the sockets.
    """
    given = os.environ.get("RAY_TMPDIR")
    places = [given] if given else [os.environ.get("TMPDIR"), "/tmp"]
    problems = []
    for base in [Path(place).absolute() for place in places if place]:
        try:
            if given:
                base.mkdir(mode=0o700, parents=True, exist_ok=True)
            private = base if _is_closed(base) else base / f"{RAY_FOLDER}{os.geteuid()}"
            if (too_long := len(os.fsencode(private / _SESSIONS)) - _LONGEST) > 0:
                problems.append(f"{base} is {too_long} bytes too long for sockets of Ray")
                continue
            if private != base:
                make_private_folder(private)
        except OSError as error:
            problems.append(f"Ray cannot keep its sockets in {base}: {error}")
            continue
        return private / _SESSIONS
    raise ConfigError(
        f"{'; '.join(problems)}. Set the environment variable RAY_TMPDIR to a folder of your own with a short name"
    )


def _is_closed(folder: Path) -> bool:
    """Whether only this user can enter a folder."""
    return is_private_folder(folder) and not folder.stat().st_mode & 0o077


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Within the context a Ray that starts takes the loopback address for the node's, as Ray does by itself on a Mac.

    There is no public argument for it: Ray replaces `_node_ip_address="127.0.0.1"` by the address of the network
    (Ray 2.60: `services.resolve_ip_for_localhost`).
    """
    before, variable = ray_constants.ENABLE_RAY_CLUSTER, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[variable] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[variable]


def _join(address: str) -> None:
    """Join a cluster, and wait for its first node to register: a node listens before it does so.

    Raises:
        ConfigError: no Ray cluster answers there, or `auto` means none or several.
        DeadlineError: no node of this machine has registered in `JOIN_TIMEOUT_S`.
    """
    if address == "auto" and not os.environ.get("RAY_ADDRESS"):
        os.environ["RAY_ADDRESS"] = own_cluster()  # Ray itself would take that of any user
    try:
        await_listener(os.environ["RAY_ADDRESS"] if address == "auto" else address)
    except ConnectionError as error:
        raise ConfigError(_no_answer(address, error)) from error
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            _init(address=address)
            return
        except (ConnectionError, RuntimeError) as error:  # Ray wraps errors of a join in a ConnectionError
            if _UNREGISTERED not in f"{error} {error.__cause__}":
                if isinstance(error, ConnectionError):
                    raise ConfigError(_no_answer(address, error)) from error
                raise
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the controller waited {JOIN_TIMEOUT_S:.0f} s for Ray on this machine to register at "
                    f"`cluster.address` = {address}; start Ray here too, as a node of that cluster"
                ) from error
            ray.shutdown()
            time.sleep(_POLL_S)


def own_cluster() -> str:
    """Address of the one Ray cluster with a node of this user on this machine; runs' own ones do not count.

    Raises:
        ConfigError: there is none, or several.
    """
    own, others = set[str](), set[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or hidden from this user
            program, *arguments = process.cmdline() or [""]
            flags = dict(argument.lstrip("-").split("=", 1) for argument in arguments if "=" in argument)
            address = flags.get("gcs-address", "")
            if Path(program).name != "raylet" or not address:
                continue
            if process.uids().real != os.getuid():
                others.add(f"{address} (of {process.username()})")
            elif not _OF_RUN.fullmatch(flags.get("temp_dir", "")):
                own.add(address)
    if len(own) == 1:
        return own.pop()
    found = f"several clusters of Ray on this machine: {', '.join(sorted(own))}" if own else "no Ray of yours here"
    not_taken = f", only {', '.join(sorted(others))}" if others and not own else ""
    raise ConfigError(
        f"`cluster.address=auto` finds {found}{not_taken}. Name the address of a cluster that you trust, start Ray, or "
        "set `cluster.address=local`: then the command starts Ray itself"
    )


def _no_answer(address: str, error: ConnectionError) -> str:
    """What a person can do if no cluster can be joined; the variable RAY_ADDRESS says what `auto` means."""
    variable = os.environ.get("RAY_ADDRESS", "")
    named = f"{address} (RAY_ADDRESS = {variable})" if address == "auto" and variable else address
    return (
        f"no Ray cluster answers at `cluster.address` = {named}: {error}. Start Ray there, name the address and the "
        "token of a running cluster, or set `cluster.address=local`: then the command starts Ray itself"
    )


def joined_nodes(cluster: ClusterConfig) -> tuple[NodeResources, ...]:
    """Nodes of the running Ray cluster that `cluster.address` names, at most `cluster.max_nodes`.

    Joins the cluster, asks every node and leaves again. The command's own node is first; the others follow by name.

    Raises:
        ConfigError: no Ray cluster answers there.
        DeadlineError: nodes did not join or answer in time.
        RuntimeError: two nodes have the same name.
    """
    start_ray(cluster, num_actors=0)
    if get_authentication_mode() != AuthenticationMode.TOKEN:  # it would have refused this process if it asked
        _log.warning(
            "the Ray cluster `cluster.address` = %s asks for no token: everybody who reaches it can run programs as "
            "its user; start it with RAY_AUTH_MODE=token",
            cluster.address,
        )
    try:
        return ask_nodes(alive_in_order()[: cluster.max_nodes or None])
    finally:
        end_ray()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The bundles of a run in a joined Ray cluster, by name of the node."""

    node_ids: Mapping[str, str]
    """Ray's id of each node."""
    strategies: Mapping[str, PlacementGroupSchedulingStrategy]

    def check(self, role: str, nodes: Sequence[str], actual_ids: Sequence[str]) -> None:
        """Compare the nodes of started processes with the placement.

        Raises:
            RuntimeError: a process runs on another node; names both.
        """
        names = {node_id: name for name, node_id in self.node_ids.items()}
        for number, (node, node_id) in enumerate(zip(nodes, actual_ids, strict=True)):
            if self.node_ids[node] != node_id:
                raise RuntimeError(
                    f"{role} {number} runs on {names.get(node_id, node_id)}, but the placement says {node}: Ray did "
                    "not follow its placement group; compare the versions of Ray on the nodes"
                )

    def gone(self, suspects: Collection[str] = ()) -> list[str]:
        """Names of the nodes that have left the Ray cluster, and of `suspects` that do not answer."""
        alive = {node.node_id for node in alive_nodes()}
        left = [name for name, node_id in self.node_ids.items() if node_id not in alive]
        asked = {name: node_id for name, node_id in self.node_ids.items() if name in suspects and name not in left}
        return [*left, *silent_nodes(asked)]

    def and_on(self, others: "Reservation") -> "Reservation":
        """These bundles and those of another reservation on other nodes."""
        return Reservation(
            node_ids={**self.node_ids, **others.node_ids}, strategies={**self.strategies, **others.strategies}
        )

    def release(self) -> None:
        """Give the bundles back to Ray."""
        groups = {strategy.placement_group.id: strategy.placement_group for strategy in self.strategies.values()}
        for group in groups.values():
            remove_placement_group(group)


def reserve(nodes: Sequence[NodeResources], num_actors: Mapping[str, int]) -> Reservation:
    """Reserve a bundle on each node: all its GPUs, and a logical CPU for each of its `num_actors` processes.

    Raises:
        DeadlineError: a node has not as much free.
        ProcessLostError: a node has left the Ray cluster.
    """
    node_ids = {node.name: node.node_id for node in alive_nodes()}
    if gone := [node.name for node in nodes if node.name not in node_ids]:
        raise ProcessLostError(f"{', '.join(gone)} left the Ray cluster before the run began; see the log of Ray there")
    bundles = []
    for node in nodes:
        gpus = {"GPU": float(len(node.gpu_bytes))} if node.gpu_bytes else {}
        bundles.append({"CPU": float(num_actors[node.name]), **gpus})
    selectors = [{NODE_ID: node_ids[node.name]} for node in nodes]
    group = placement_group(bundles, strategy="SPREAD", bundle_label_selector=selectors)
    if not group.wait(ANSWER_TIMEOUT_S):
        remove_placement_group(group)
        needs = ", ".join(f"{node.name} {_text(bundle)}" for node, bundle in zip(nodes, bundles, strict=True))
        raise DeadlineError(
            f"the controller waited {ANSWER_TIMEOUT_S:.0f} s for Ray to reserve {needs}; end what else uses these "
            "nodes, or start Ray there with as many CPUs and GPUs"
        )
    return Reservation(
        node_ids={node.name: node_ids[node.name] for node in nodes},
        strategies={
            node.name: PlacementGroupSchedulingStrategy(group, number, False) for number, node in enumerate(nodes)
        },
    )


def _wait_for_nodes(num_nodes: int) -> None:
    """Wait until so many nodes are in the cluster, without spare ones.

    Raises:
        DeadlineError: they are not after `JOIN_TIMEOUT_S`.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while (joined := sum(not node.is_spare for node in alive_nodes())) < num_nodes:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"the controller waited {JOIN_TIMEOUT_S:.0f} s for {num_nodes} nodes (`cluster.min_nodes`) to join "
                f"Ray, {joined} have; see the log of Ray on the others"
            )
        time.sleep(_POLL_S)


def _text(bundle: Mapping[str, float]) -> str:
    return "(" + ", ".join(f"{amount:.0f} {resource}" for resource, amount in bundle.items()) + ")"
