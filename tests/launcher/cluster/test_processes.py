"""Environment of started processes."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from launcher.cluster import processes
from launcher.cluster.node import NodeResources
from launcher.cluster.processes import Processes
from launcher.cluster.ray_cluster import Reservation
from launcher.commands.specs import trainer_spec
from launcher.config.schema import RunConfig
from megatron_rl.ranks import TrainerRank
from megatron_rl.trainer.messages import TrainerSpec
from rollout.failures import CallError, DeadlineError, Place, PlacedError
from rollout.processes import DETERMINISTIC, HEAP, ProcessEnv
from rollout.types import EngineSlot
from rollout.weights.format import WeightFormat

ENVIRONMENT = ProcessEnv(single_node=True)


def test_allocator_settings_of_the_environment_override_the_defaults_of_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in HEAP:
        monkeypatch.delenv(name, raising=False)
    running = Processes(environment=ENVIRONMENT, log_dir=tmp_path, nodes=())
    found = running._variables(ENVIRONMENT.engine(threads=1), "engine-0")
    assert HEAP.items() <= found.items() and found["MEGATRON_RL_LOG"] == str(tmp_path / "engine-0.log")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    found = running._variables(ENVIRONMENT.engine(threads=1), "engine-0")
    assert found.items() >= (HEAP | {"MALLOC_TRIM_THRESHOLD_": "4096"}).items()
    # only engines have a heap of their own
    assert not HEAP.keys() & running._variables(ENVIRONMENT.trainer_rank(threads=1), "trainer-0").keys()


def test_the_devices_of_a_process_are_named_as_its_node_names_them() -> None:
    whole = NodeResources(name="a", cpu_cores=8, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * 4)
    part = NodeResources(
        name="b", cpu_cores=8, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * 2, gpu_ids=("GPU-5", "GPU-7")
    )
    running = Processes(environment=ENVIRONMENT, log_dir=None, nodes=(whole, part))

    def visible(node: str, *devices: int) -> str | None:
        slot = EngineSlot(engine_id=0, num_ranks=1, cpu_cores=1, num_gpus=1.0, node=node, devices=devices)
        return running._devices(slot).get("CUDA_VISIBLE_DEVICES")

    assert visible("a", 2, 3) == "2,3"
    assert visible("b", 1) == "GPU-7"
    assert visible("a") is None


def rank(*devices: int) -> TrainerRank:
    return TrainerRank(
        rank=0,
        tensor_rank=0,
        pipeline_rank=0,
        data_rank=0,
        cpu_threads=1,
        num_gpus=float(bool(devices)),
        node="a",
        devices=devices,
    )


def spec_of(**parts: object) -> TrainerSpec:
    base = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}
    return trainer_spec(RunConfig.model_validate(base | parts), WeightFormat(name="bf16"), "run")


NODE = NodeResources(name="a", cpu_cores=8, available_bytes=1 << 40, gpu_bytes=(80 << 30,))


@pytest.mark.parametrize(
    ("parts", "devices", "is_set"),
    [
        ({"deterministic": True}, (0,), True),
        ({"trainer": {"megatron": {"deterministic_mode": True}}}, (0,), True),
        ({"deterministic": True, "trainer": {"megatron": {"deterministic_mode": False}}}, (0,), False),
        ({"deterministic": True}, (), False),
        ({}, (0,), False),
    ],
)
def test_a_deterministic_trainer_rank_on_a_gpu_has_the_variables_that_its_libraries_ask_for(
    monkeypatch: pytest.MonkeyPatch, parts: Mapping[str, object], devices: tuple[int, ...], is_set: bool
) -> None:
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    found = Processes(environment=ENVIRONMENT, log_dir=None, nodes=(NODE,))._of_rank(spec_of(**parts), rank(*devices))
    asked_for = {
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "^NVLS,NVLSTree",
    }
    assert {name: found[name] for name in asked_for if name in found} == (asked_for if is_set else {})


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        ({"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, []),
        ({"NCCL_ALGO": "ring"}, []),
        ({"NCCL_ALGO": "^NVLS"}, ["NCCL_ALGO = ^NVLS", "unset it, or set it to ^NVLS,NVLSTree or Ring or Tree"]),
        ({"NCCL_ALGO": "CollnetDirect"}, ["NCCL_ALGO = CollnetDirect"]),
        (
            {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"},
            ["NVTE_ALLOW_NONDETERMINISTIC_ALGO = 1 in the environment", "or not start; unset it, or set it to 0"],
        ),
    ],
)
def test_a_variable_that_the_user_has_exported_stays_and_is_told_if_it_contradicts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exported: dict[str, str], said: list[str]
) -> None:
    environments: list[Mapping[str, str]] = []

    def start(spec: TrainerSpec, **named: list[Mapping[str, str]]) -> None:
        environments.extend(named["environments"])

    monkeypatch.setattr(processes, "start_trainer", start)
    for name in DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    running = Processes(environment=ENVIRONMENT, log_dir=None, nodes=(NODE,))
    with caplog.at_level(logging.WARNING):
        running.start_trainer(spec_of(deterministic=True), [rank(0)])
        assert environments[0].items() >= exported.items()
        assert len(caplog.messages) == bool(said) and all(part in caplog.messages[0] for part in said)
        running.start_trainer(spec_of(), [rank(0)])
    assert len(caplog.messages) == bool(said), "a trainer that is not deterministic has nothing to contradict"


HANG = DeadlineError("trainer.join: rank(s) [1] of 2 made no progress for 600 s", Place(role="trainer", ranks=(1,)))
GLOO = CallError("trainer.join failed on rank 1 of 2: RuntimeError: Gloo connectFullMesh failed", Place(role="trainer"))
OTHER = CallError("trainer.join failed on rank 1 of 2: OSError: no such file", Place(role="trainer"))


@pytest.mark.parametrize(
    ("error", "nodes", "is_named"),
    [(HANG, "ab", True), (GLOO, "ab", True), (OTHER, "ab", False), (HANG, "aa", False), (GLOO, "aa", False)],
)
def test_ranks_on_several_nodes_that_do_not_meet_name_the_variables_of_interfaces(
    monkeypatch: pytest.MonkeyPatch, error: PlacedError, nodes: str, is_named: bool
) -> None:
    def start(spec: TrainerSpec, **_: object) -> None:
        raise error

    monkeypatch.setattr(processes, "start_trainer", start)
    both = tuple(replace(NODE, name=name) for name in sorted(set(nodes)))
    running = Processes(environment=ENVIRONMENT, log_dir=None, nodes=both)
    with pytest.raises(type(error)) as raised:
        running.start_trainer(spec_of(), [replace(rank(0), node=name) for name in nodes])
    assert str(raised.value).startswith(str(error)) and raised.value.place == error.place
    assert ("GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in str(raised.value)) == is_named


def test_kernels_of_trainer_ranks_start_in_the_order_of_their_calls() -> None:
    assert ENVIRONMENT.trainer_rank(threads=1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ENVIRONMENT.engine(threads=1)


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_task_runs_in_the_bundle_of_the_first_node_and_takes_no_further_cpu(
    monkeypatch: pytest.MonkeyPatch, is_joined: bool
) -> None:
    """Over a stand-in for Ray; `tests.support.cluster.three_ray_nodes` starts one in a bundle that has all CPUs."""
    given: dict[str, object] = {}

    def with_options(**options: object) -> SimpleNamespace:
        given.update(options)
        return SimpleNamespace(remote=lambda *arguments, **named: (arguments, named))

    monkeypatch.setattr(ray, "remote", lambda function: SimpleNamespace(options=with_options))
    nodes = tuple(NodeResources(name=name, cpu_cores=8, available_bytes=1 << 40, gpu_bytes=()) for name in "ab")
    bundles = {name: cast(PlacementGroupSchedulingStrategy, f"bundle of {name}") for name in "ab"}
    reservation = cast(Reservation, SimpleNamespace(strategies=bundles)) if is_joined else None
    running = Processes(environment=ENVIRONMENT, log_dir=None, nodes=nodes, reservation=reservation)
    assert running.start_task(len, "rows.jsonl", limit=3) == (("rows.jsonl",), {"limit": 3})
    assert given.pop("runtime_env") == {"env_vars": ENVIRONMENT.single_threaded()}
    assert given == {
        "num_cpus": 0 if is_joined else 1,
        "scheduling_strategy": "bundle of a" if is_joined else None,
    }
