import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.health import (
    NodeFacts,
    NodeNeeds,
    choose_nodes,
    clock_difference_s,
    node_facts,
    node_needs,
    node_problems,
    other_copies,
)
from launcher.cluster.node import package_versions
from launcher.config.loading import load
from launcher.config.schema import RunConfig

NEEDS = NodeNeeds(
    paths=("/shared/model",),
    models=(),
    packages={"torch": "2.13.0"},
    num_gpus=8,
    shm_bytes=1 << 30,
    temp_dir="/tmp",
)
HEALTHY = NodeFacts(
    node="n1",
    unreadable=(),
    model_files={},
    packages={"torch": "2.13.0", "numba": "0.61"},
    num_gpus=8,
    gpu_processes=(),
    shm_bytes=2 << 30,
    disk_bytes=2 << 30,
    open_files=65536,
    clock_skew_s=0.01,
)


def test_a_healthy_node_has_no_problem() -> None:
    assert node_problems(HEALTHY, NEEDS) == []


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"unreadable": ("/shared/model",)}, "cannot read /shared/model; mount it there"),
        ({"packages": {"torch": "2.12.0"}}, "torch is 2.12.0, but 2.13.0 where the job was submitted"),
        ({"packages": {}}, "torch is missing, but 2.13.0"),
        ({"num_gpus": 7}, "7 GPU(s), but `cluster.slurm.gpus_per_node` = 8"),
        ({"num_gpus": 9}, "9 GPU(s), but `cluster.slurm.gpus_per_node` = 8; set it to 9"),
        ({"gpu_processes": ("411, python",)}, "other processes use its GPUs: 411, python"),
        ({"shm_bytes": 5}, "/dev/shm has 5 bytes free"),
        ({"disk_bytes": 5}, "/tmp has 5 bytes free"),
        ({"open_files": 1024}, "1024 open files allowed"),
        ({"clock_skew_s": -3.0}, "its clock is -3.0 s off the file server's"),
    ],
)
def test_a_fault_is_exactly_one_problem(fault: dict[str, object], problem: str) -> None:
    (found,) = node_problems(replace(HEALTHY, **fault), NEEDS)
    assert found.startswith(problem)


def test_gpus_that_ray_would_not_count_are_a_problem_in_a_job_only() -> None:
    (found,) = node_problems(HEALTHY, replace(NEEDS, num_gpus=0))
    assert found.startswith("8 GPU(s), but `cluster.slurm.gpus_per_node` = 0; set it to 8")
    assert node_problems(HEALTHY, replace(NEEDS, num_gpus=None)) == []


def test_this_node_is_read(tmp_path: Path) -> None:
    needs = replace(NEEDS, paths=(str(tmp_path), "/no/such"), packages=package_versions(), num_gpus=0, shm_bytes=1)
    facts = node_facts(needs, tmp_path / "checks" / "me.canary")
    assert facts.unreadable == ("/no/such",) and abs(facts.clock_skew_s) < 0.5


@pytest.mark.parametrize("critic", ["", "/shared/critic"])
def test_a_node_needs_the_models_of_policy_and_critic(write_config: Callable[[str], Path], critic: str) -> None:
    config = load(RunConfig, write_config(""), [f"trainer.critic.model={critic}"] if critic else [])
    needs = node_needs(config, {})
    assert needs.models == tuple(filter(None, (config.model, critic)))
    assert needs.paths[: len(needs.models)] == needs.models and config.data.train[0].path in needs.paths


def test_a_node_with_another_copy_of_the_model_is_named_with_the_files(tmp_path: Path) -> None:
    """Three nodes have a copy each; the first one's was edited, and one file of weights was not copied whole."""
    copies = {}
    for node in ("n1", "n2", "n3"):
        model = tmp_path / "model"  # at the same path on each
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(f'{{"rope_theta": {10_000 if node == "n1" else 1_000_000}}}')
        (model / "model-1.safetensors").write_bytes(bytes(7 if node == "n1" else 8))
        (model / "README.md").write_text(f"read on {node}")
        needs = replace(NEEDS, models=(str(model), "/no/such"), shm_bytes=1)
        copies[node] = node_facts(needs, tmp_path / "checks" / f"{node}.canary").model_files
    problem = other_copies(copies)["n1"]
    assert other_copies(copies).keys() == {"n1"} and problem.startswith("has other contents than n2 in ")
    assert [f"{name}" in problem for name in ("config.json", "model-1.safetensors", "README")] == [True, True, False]
    assert other_copies({"n1": copies["n1"], "n2": copies["n2"]}).keys() == {"n2"}, "of two the first one counts"
    assert other_copies({"n2": copies["n2"], "n3": copies["n3"]}) == other_copies({}) == {}


@pytest.mark.parametrize(
    ("visible", "processes"),
    [(None, ("0, a", "6, b", "7, c")), ("6,7", ("6, b", "7, c")), ("GPU-b,7", ("6, b", "7, c")), ("", ())],
)
def test_processes_on_gpus_that_the_run_may_not_use_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, processes: tuple[str, ...]
) -> None:
    """The stand-in takes devices as the tool does: `--id=` with numbers or identifiers, separated by commas."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in *memory.total*)'
        " for gpu in 0-e 1-f 2-g 3-h 4-i 5-j 6-b 7-c; do echo ${gpu%-*}, GPU-${gpu#*-}, 81559, 480, 9.0; done;"
        " exit;; esac\n"
        'case "$*" in *compute-apps*) ;; *) exit;; esac\n'
        'case "$*" in *--id=*6*|*--id=*GPU-b*) echo 6, b;; esac\n'
        'case "$*" in *--id=*7*) echo 7, c;; *--id=*) ;; *) echo 0, a; echo 6, b; echo 7, c;; esac\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    needs = replace(NEEDS, paths=(), num_gpus=0, shm_bytes=1)
    assert node_facts(needs, tmp_path / "canary").gpu_processes == processes


@pytest.mark.parametrize(
    ("written_s", "difference_s"),
    [(100.0, 0.0), (103.0, 0.0), (107.5, 0.0), (99.0, 1.0), (109.5, -2.0)],
    ids=["at the begin", "between", "at the end", "before the begin", "after the end"],
)
def test_a_slow_file_system_is_no_wrong_clock(written_s: float, difference_s: float) -> None:
    assert clock_difference_s(100.0, written_s, 107.5) == difference_s


@pytest.mark.parametrize("begun_s", [100 + tenths / 10 for tenths in range(10)])
def test_a_file_server_that_keeps_whole_seconds_has_no_wrong_clock(begun_s: float) -> None:
    assert clock_difference_s(begun_s, float(int(begun_s)), begun_s + 0.01, resolution_s=1.0) == 0


def test_a_wrong_clock_is_found_by_whole_seconds() -> None:
    assert clock_difference_s(103.2, 100.0, 103.3, resolution_s=1.0) == pytest.approx(2.2)
    assert clock_difference_s(103.2, 106.0, 103.3, resolution_s=1.0) == pytest.approx(-2.7)


class Canary(type(Path())):  # type: ignore[misc]  # the class of paths of this system
    """A file that another clock has written."""

    mtime_ns = 0

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.name == "canary":
            os.utime(self, ns=(self.mtime_ns, self.mtime_ns))
        return super().stat(follow_symlinks=follow_symlinks)


@pytest.mark.parametrize(("mtime_ns", "skew_s"), [(100 * 10**9, 0.0), (100 * 10**9 + 10**8, 0.8)])
def test_a_file_time_of_whole_seconds_is_known_by_its_nanoseconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mtime_ns: int, skew_s: float
) -> None:
    monkeypatch.setattr("launcher.cluster.health.time.time", lambda: 100.9)
    monkeypatch.setattr(Canary, "mtime_ns", mtime_ns)
    assert node_facts(NEEDS, Canary(tmp_path / "canary")).clock_skew_s == pytest.approx(skew_s)


def test_the_first_healthy_nodes_are_chosen_and_the_others_named() -> None:
    found = choose_nodes(["n1", "n2", "n3", "n4"], {"n1": ["is ill"], "n2": [], "n4": []}, num_nodes=2)
    assert found.nodes == ("n2", "n4")
    assert found.spares == () and found.left_out[0] == "n1: is ill"
    assert found.left_out[1].startswith("n3: has written no record")


def test_healthy_nodes_beyond_those_of_the_run_are_spare() -> None:
    found = choose_nodes(["n1", "n2", "n3"], {"n1": [], "n2": [], "n3": []}, num_nodes=2)
    assert (found.nodes, found.spares) == (("n1", "n2"), ("n3",))


def test_too_few_healthy_nodes_are_no_choice() -> None:
    assert choose_nodes(["n1", "n2"], {"n1": []}, num_nodes=2).nodes == ()


def test_a_node_without_a_connection_is_left_out_with_the_pair() -> None:
    nodes = ["n1", "n2", "n3"]
    choice = choose_nodes(nodes, {node: [] for node in nodes}, num_nodes=2, unreachable={"n1": ["n2"], "n3": ["n2"]})
    assert choice.nodes == ("n1", "n3")
    assert choice.left_out[0].startswith("n2: cannot connect to n1, n3, or is not reached from there")
