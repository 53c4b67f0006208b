"""Processes of a joined Ray cluster: each in the bundle of its node. Ray's test cluster: three raylets, one machine."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import psutil
import pytest
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationMode

from history.own_files import is_private_folder
from launcher.cluster import alive_nodes, ray_cluster, ray_limits
from launcher.cluster.alive_nodes import AliveNode, natural_order
from launcher.cluster.node import RAY_START_TRIES, NodeResources
from launcher.cluster.processes import Processes
from launcher.cluster.ray_cluster import start_ray
from launcher.config.schema import ClusterConfig
from launcher.errors import ConfigError
from rollout.failures import DeadlineError
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT


def test_names_of_nodes_are_sorted_by_their_numbers() -> None:
    names = ["gpu-b1n10", "gpu-b1n2", "10.0.0.9", "10.0.0.10", "login"]
    assert sorted(names, key=natural_order) == ["10.0.0.9", "10.0.0.10", "gpu-b1n2", "gpu-b1n10", "login"]


def test_a_cluster_without_a_registered_node_is_joined_again_until_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def init(*, address: str) -> None:
        tries.append(address)
        if len(tries) < 3:
            raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError("No node info found matching")
        if address == "broken":
            raise RuntimeError("another message")

    monkeypatch.setattr(ray_cluster, "_init", init)
    monkeypatch.setattr(ray_cluster, "await_listener", lambda address: None)
    monkeypatch.setattr(ray_cluster, "_POLL_S", 0.0)
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)  # the session's own Ray stays
    ray_cluster._join("10.0.0.1:6379")
    assert tries == ["10.0.0.1:6379"] * 3
    with pytest.raises(RuntimeError, match="another message"):
        ray_cluster._join("broken")


def failing_init(message: str, cause: str) -> Callable[..., None]:
    """Fails as `ray.init` does, which wraps errors of a join."""

    def init(*, address: str) -> None:
        raise ConnectionError(message) from RuntimeError(cause)

    return init


def test_an_address_where_no_cluster_answers_is_an_error_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "await_listener", lambda address: None)
    monkeypatch.setattr(
        ray_cluster, "_init", failing_init("Failed to connect to Ray cluster", "Failed to connect to GCS")
    )
    with pytest.raises(
        ConfigError, match=r"no Ray cluster answers at `cluster\.address` = 10\.0\.0\.1:6379: .*Start Ray"
    ):
        ray_cluster._join("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    with pytest.raises(ConfigError, match=r"`cluster\.address` = auto \(RAY_ADDRESS = 10\.0\.0\.2:6379\)"):
        ray_cluster._join("auto")


def test_an_address_where_nobody_listens_is_refused_before_ray_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_limits, "LISTEN_LIMIT_S", 0.0)
    monkeypatch.setattr(ray_cluster, "_init", lambda **_: pytest.fail("Ray would wait for a quarter of an hour"))
    with socket.socket() as bound:  # which does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        said = r"nobody listened there in 0 s \(.*Connection refused\)\. Start Ray there"
        with pytest.raises(ConfigError, match=rf"`cluster\.address` = {address}: {said}"):
            ray_cluster._join(address)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=said):
            ray_cluster._join("auto")


def test_a_head_may_begin_to_listen_while_it_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_limits, "_POLL_S", 0.01)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        begin = threading.Timer(0.2, head.listen)
        begin.start()
        ray_limits.await_listener(f"127.0.0.1:{head.getsockname()[1]}")
        begin.join()


@pytest.mark.parametrize("address", ["", "auto", "local", "ray://head:10001"])
def test_only_an_address_of_host_and_port_is_looked_at(address: str) -> None:
    ray_limits.await_listener(address)


def test_a_machine_whose_node_never_registers_is_named_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "_init", failing_init("Failed to connect to Ray cluster", "No node info found"))
    monkeypatch.setattr(ray_cluster, "await_listener", lambda address: None)
    monkeypatch.setattr(ray_cluster, "JOIN_TIMEOUT_S", -1.0)
    with pytest.raises(
        DeadlineError, match=r"Ray on this machine to register at `cluster\.address` = 10\.0\.0\.1:6379"
    ):
        ray_cluster._join("10.0.0.1:6379")


def test_a_local_ray_that_is_late_is_started_again_and_any_other_error_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[str] = []
    monkeypatch.setattr(ray_cluster, "_init", lambda **_: errors and _raise(errors.pop(0)))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: None)  # the session's own Ray stays
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    late = "The current node timed out during startup."
    for tries, expected in (([late, late], None), ([late] * 3, DeadlineError), (["no memory"], RuntimeError)):
        errors[:] = tries
        caplog.clear()
        with pytest.raises(expected) if expected else nullcontext():
            start_ray(ClusterConfig(), num_actors=1)
        assert errors == []
        assert len(caplog.records) == min(tries.count(late), RAY_START_TRIES - 1)


def test_no_other_user_reaches_the_sockets_of_a_local_ray(running: Processes) -> None:
    """Ray's own folders are open to all, whatever the umask, so one above them must not be."""
    assert running.environment.single_node
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    assert (session / "sockets").stat().st_mode & 0o002, "else Ray needs no private folder any more"
    assert any(is_private_folder(path) and not path.stat().st_mode & 0o077 for path in session.parents)
    assert len(os.fsencode(session / "sockets" / "plasma_store")) <= 107


@pytest.mark.parametrize("name", ["long" * 20, "file", ""], ids=["long", "file", "planted"])
def test_a_folder_that_cannot_hold_rays_sockets_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as base:
        Path(base).chmod(0o755)
        Path(base, "file").touch()
        planted = Path(base, f"mrl-{os.geteuid()}")
        planted.mkdir()
        planted.chmod(0o777)
        monkeypatch.setenv("RAY_TMPDIR", str(Path(base, name)))
        monkeypatch.setattr(ray_cluster, "_init", lambda **_: pytest.fail("Ray would start"))
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
        with pytest.raises(ConfigError, match=r"(?s)sockets.*Set the environment variable RAY_TMPDIR"):
            start_ray(ClusterConfig(), num_actors=1)


def test_rays_sockets_are_where_the_environment_asks_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path
) -> None:
    user = os.geteuid()
    of_job, of_ray = short_folder / "job", short_folder / "a" / "ray"
    of_job.mkdir(mode=0o755)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(of_job))
    assert ray_cluster._local_folder() == of_job / f"mrl-{user}" / ".mrl"
    monkeypatch.setenv("RAY_TMPDIR", str(of_ray))
    for _ in range(2):  # it is made, and is private then
        assert ray_cluster._local_folder() == of_ray / ".mrl"
    assert of_ray.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["missing", "long" * 30, "file"])
def test_a_temporary_folder_of_a_job_that_cannot_hold_rays_sockets_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, short_folder: Path, name: str
) -> None:
    (short_folder / "file").touch()
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(short_folder / name))
    assert ray_cluster._local_folder() == Path(f"/tmp/mrl-{os.geteuid()}/.mrl")


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Other temporary folders of tests have names that are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as folder:
        yield Path(folder)


@pytest.fixture
def raylets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Starts a process with the command line of a raylet; returns its address. Other raylets are not seen."""
    with ExitStack() as started:
        pids: list[int] = []

        def start(port: int, *, temp_dir: str = "/tmp/ray") -> str:
            address = f"127.0.0.1:{port}"
            line = ["raylet", "-c", "read line", f"--temp_dir={temp_dir}", f"--gcs-address={address}"]
            process = subprocess.Popen(line, executable="/bin/bash", stdin=subprocess.PIPE)
            started.enter_context(process)  # closes its input
            pids.append(process.pid)
            return address

        monkeypatch.setattr(ray_cluster.psutil, "process_iter", lambda: map(psutil.Process, pids))
        yield start


def test_auto_means_the_one_cluster_that_this_user_has_started(raylets: Callable[..., str]) -> None:
    raylets(1, temp_dir=f"/tmp/mrl-{os.getuid()}/.mrl")
    raylets(2, temp_dir="/tmp/mrl-77-0-ab_01xyz/ray")
    with pytest.raises(ConfigError, match=r"`cluster\.address=auto` finds no Ray of yours here\. Name the address"):
        ray_cluster.own_cluster()
    own = raylets(3, temp_dir="/scratch/mrl-team/ray")
    assert ray_cluster.own_cluster() == own == raylets(3), "two nodes of a cluster"
    raylets(4)
    with pytest.raises(ConfigError, match=r"several clusters .*: 127\.0\.0\.1:3, 127\.0\.0\.1:4\. Name"):
        ray_cluster.own_cluster()


def test_auto_is_no_cluster_of_another_user(raylets: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_init", lambda **_: pytest.fail("it would be joined"))
    raylets(5)
    monkeypatch.setattr(ray_cluster.os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"no Ray of yours here, only 127\.0\.0\.1:5 \(of \w+\)"):
        ray_cluster._join("auto")


JOINS = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR'); print('joined', len(ray.nodes()))"


def test_the_ray_of_a_local_run_refuses_a_process_without_its_token(running: Processes) -> None:
    """A process with it is let in: so a refusal is one of the token."""
    assert running.environment.single_node
    line = [sys.executable, "-c", JOINS, ray.get_runtime_context().gcs_address]
    strangers = {"a wrong token": {"RAY_AUTH_TOKEN": "0" * 64}, "no token": {"RAY_AUTH_MODE": "disabled"}}
    loopback = os.environ | {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}  # else Ray asks the network's address
    processes = {
        name: subprocess.Popen(line, env=loopback | change, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, change in {**strangers, "the token": {}}.items()
    }
    said = {name: process.communicate(timeout=DEADLINE_S) for name, process in processes.items()}
    assert processes["the token"].returncode == 0 and said["the token"][0].startswith("joined 1"), said["the token"]
    for name in strangers:
        output, errors = said[name]
        assert processes[name].returncode != 0 and "joined" not in output, name
        assert "Authentication token is missing or incorrect" in errors, f"{name}: {errors}"


@pytest.mark.parametrize(("mode", "is_said"), [("TOKEN", False), ("DISABLED", True)])
def test_a_joined_cluster_that_asks_for_no_token_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: str, is_said: bool
) -> None:
    for name, answer in (("start_ray", None), ("end_ray", None), ("alive_in_order", []), ("ask_nodes", ())):
        monkeypatch.setattr(ray_cluster, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(ray_cluster, "get_authentication_mode", lambda: getattr(AuthenticationMode, mode))
    assert ray_cluster.joined_nodes(ClusterConfig(address="10.0.0.1:6379")) == ()
    said = [record.getMessage() for record in caplog.records]
    assert ["`cluster.address` = 10.0.0.1:6379 asks for no token" in line for line in said] == [True] * is_said


def test_a_spare_node_that_does_not_answer_is_left_out_and_a_node_of_the_run_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [AliveNode(node_id=name, name=name, labels={}) for name in ("n1", "n2", "n3")]
    told = NodeResources(cpu_cores=1, available_bytes=1, gpu_bytes=(), name="n3")
    monkeypatch.setattr(alive_nodes, "alive_in_order", lambda: nodes)
    monkeypatch.setattr(alive_nodes, "_answers", lambda asked: [told if node.name == "n3" else None for node in asked])
    assert alive_nodes.other_nodes(["n1"]) == (told,)
    assert ["n2 did not tell their resources" in record.getMessage() for record in caplog.records] == [True]
    with pytest.raises(DeadlineError, match=r"120 s for n1, n2 to tell their resources"):
        alive_nodes.ask_nodes(nodes)


def _raise(message: str) -> None:
    raise RuntimeError(message)


@pytest.mark.slow
@pytest.mark.long
def test_processes_run_in_the_bundle_of_their_node_until_another_node_replaces_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.cluster.three_ray_nodes"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["names"] == ["node2", "node9", "node1"], "the spare node is the last"
    assert answer["racks"] == ["leaf3", "", ""]
    assert set(answer["cores"]) == {len(os.sched_getaffinity(0))}
    assert answer["used"] == ["node2", "node9"]
    assert answer["right"] == {"node2": [True, True], "node9": [True, True]}
    assert answer["task"] is True, "a task starts although the bundle has all CPUs of the first node"
    assert answer["history"] is True and answer["shards"] is True
    assert answer["swapped"].startswith("engine 0 runs on node9, but the placement says node2")
    assert "reserve node2 (2 CPU), node9 (1 CPU)" in answer["full"]
    assert answer["others"] == ["node1"] and answer["first"] == ["node2", "node9"]
    assert (answer["before"], answer["gone"]) == ([], ["node9"])
    assert answer["replaced"] == ["node2", "node1"] and answer["right place"]
    assert answer["gone afterwards"] == []
    assert answer["scorer"] and answer["scorer afterwards"], "Ray restarts a scorer on a node that is left"
    assert answer["lost tokens"] == "TokensLostError", "so that the pool samples the group again"
