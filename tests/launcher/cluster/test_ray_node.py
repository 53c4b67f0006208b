"""Ray on one node: its command, and that nothing of it stays."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.cluster import ray_node
from launcher.cluster.job_folder import VARIABLE, Head, JobFolder, note_begin
from launcher.cluster.ports import PortMap
from launcher.cluster.ray_node import RayNode, make_temp_dir, ray_command, ray_environment, topology_labels

HEAD = RayNode(
    name="node7",
    labels={"rack": "leaf3", "block": "spine"},
    address="10.0.0.7",
    interface="ib0",
    ports=PortMap(base=20000),
    head=None,
    num_cpus=16,
    num_gpus=8,
    object_store_bytes=1 << 28,
    temp_dir=Path("/tmp/mrl-1-0"),
)


def test_the_head_listens_and_the_others_join_it() -> None:
    assert {"--head", "--port=20000", "--node-name=node7", "--labels=rack=leaf3,block=spine"} <= set(ray_command(HEAD))
    assert "--temp-dir=/tmp/mrl-1-0/ray" in ray_command(HEAD), "Ray opens its folder to all users"
    other = RayNode(
        **{name: getattr(HEAD, name) for name in HEAD.__slots__ if name != "head"},
        head=Head(address="10.0.0.6", port=20200, ready_port=20201),
    )
    command = ray_command(other)
    assert "--address=10.0.0.6:20200" in command and "--head" not in command
    assert ray_environment(other)["GLOO_SOCKET_IFNAME"] == "ib0"


def test_the_folder_of_a_job_is_private_and_nobody_can_have_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_node, "_TMP", tmp_path)
    planted, other = tmp_path / "mrl-7-1-planted", tmp_path / "mrl-7-11-other"
    planted.mkdir()
    planted.chmod(0o777)
    other.mkdir(mode=0o700)
    first = make_temp_dir(7, 1)
    (first / "ray").mkdir()
    second = make_temp_dir(7, 1)
    assert second.stat().st_mode & 0o777 == 0o700 and not list(second.iterdir())
    assert {*tmp_path.iterdir()} == {planted, other, second}, "that of the earlier start is gone"


def test_switches_of_slurms_topology_become_labels() -> None:
    assert topology_labels("spine.leaf3.node17") == {"rack": "leaf3", "block": "spine"}
    assert topology_labels("leaf3.node17") == {"rack": "leaf3"}
    assert topology_labels("node17") == topology_labels("") == {}


LEAVES_ORPHANS = """
import ctypes, subprocess, sys, time
from launcher.cluster.ray_node import end_family
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
orphan = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}], start_new_session=True)"
child = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE)
child.stdout.readline(); child.wait()
import launcher.cluster.ray_node as module, psutil
module.END_TIMEOUT_S = 0.2
before = len(psutil.Process().children(recursive=True))
end_family()
print(before, len(psutil.Process().children(recursive=True)))
"""


def test_orphans_that_ignore_a_signal_are_ended_too() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_ORPHANS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0"]
    assert psutil.pid_exists(psutil.Process().pid)


FAKE_RAY = """
import resource, sys, time
from pathlib import Path
folder, good_try = Path(sys.argv[1]), int(sys.argv[2])
with (folder / "tries").open("a") as file:
    file.write("x")
if len((folder / "tries").read_text()) < good_try:
    sys.exit(1)
(folder / "open_files").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
(folder / "over").touch()
time.sleep(600)
"""
RUNS_FAKE_RAY = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import launcher.cluster.ray_node as module
from launcher.cluster.job_folder import JobFolder
from tests.launcher.cluster.test_ray_node import FAKE_RAY, HEAD, folder_of
path = Path(sys.argv[1])
folder = folder_of(path, "node6", "node7", begun=sys.argv[3] == "True")
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
module.ray_command = lambda node: [sys.executable, "-c", FAKE_RAY, *sys.argv[1:3]]
module.sweep = module.sweep_segments = lambda: None
code = module.run_ray(replace(HEAD, temp_dir=path / "temp"), folder, log=path / "logs" / "ray.log")
print(code, len((path / "tries").read_text()), (path / "lost" / "node7").exists(), (path / "temp").exists())
"""


@pytest.mark.parametrize(
    ("good_try", "begun", "told"),
    [(3, False, "0 3 False False"), (4, False, "1 3 True False"), (2, True, "1 1 True False")],
    ids=["the third try", "no try", "the run has begun"],
)
def test_ray_that_ends_before_the_run_has_begun_is_started_again(
    tmp_path: Path, good_try: int, begun: bool, told: str
) -> None:
    line = [sys.executable, "-c", RUNS_FAKE_RAY, str(tmp_path), str(good_try), str(begun)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    *said, last = done.stdout.splitlines()
    assert last == told, done.stdout
    assert len(said) == int(told.split()[1]) - 1 and all("is started again" in line for line in said)
    if (limits := tmp_path / "open_files").exists():  # Ray has run
        soft, hard = json.loads(limits.read_text().replace("(", "[").replace(")", "]"))
        assert soft == hard, "Ray starts with as many open files as the check of the node has seen"


def job_folder(path: Path) -> JobFolder:
    return JobFolder(path=path, config=path / "config.yaml")


def test_nobody_waits_for_the_head_of_a_run_that_is_over(tmp_path: Path) -> None:
    folder = job_folder(tmp_path)
    (tmp_path / "over").touch()
    assert folder.wait_for_head(60) is None
    folder.write_head(Head(address="10.0.0.6", port=20200, ready_port=20201))
    assert folder.wait_for_head(60) == Head(address="10.0.0.6", port=20200, ready_port=20201)


def folder_of(path: Path, *nodes: str, begun: bool = False) -> JobFolder:
    (path / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    if begun:
        (path / "begun").touch()
    return job_folder(path)


@pytest.mark.parametrize(
    ("lost", "begun", "ends"),
    [
        (["node2"], False, True),
        (["node2"], True, False),
        (["node1"], True, True),
        (["node3", "node1"], True, True),
        ([""], True, True),
        ([], False, False),
    ],
    ids=["before the run", "another node", "the head", "the head too", "without a name", "none"],
)
def test_a_run_that_has_begun_goes_on_without_a_node_but_not_without_rays_head(
    tmp_path: Path, lost: list[str], begun: bool, ends: bool
) -> None:
    folder = folder_of(tmp_path, "node1", "node2", "node3", begun=begun)
    for node in lost:
        folder.note_lost_node(node)
    assert folder.must_end() is ends


def test_a_file_system_that_fails_for_a_moment_ends_nothing(tmp_path: Path) -> None:
    """A name that is too long stands for any error that `Path.exists` raises."""
    folder = job_folder(tmp_path / ("long" * 100))
    with pytest.raises(OSError, match="too long"):
        (folder.path / "over").exists()
    assert not folder.is_over() and not folder.must_end()


RAISES_OPEN_FILES = """
import resource, subprocess, sys
from launcher.cluster.node import raise_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
limit = raise_open_files()
child = subprocess.run(["bash", "-c", "ulimit -n"], capture_output=True, text=True, check=True)
print(limit == hard == int(child.stdout))
"""


def test_children_inherit_the_raised_limit_of_open_files() -> None:
    done = subprocess.run([sys.executable, "-c", RAISES_OPEN_FILES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_only_a_run_in_a_job_notes_its_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    note_begin()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    note_begin()
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]
