"""Environment of started processes."""

from pathlib import Path

import pytest

from launcher.cluster.node import NodeResources
from launcher.cluster.processes import Processes
from rollout.processes import HEAP, ProcessEnv
from rollout.types import EngineSlot

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


def test_kernels_of_trainer_ranks_start_in_the_order_of_their_calls() -> None:
    assert ENVIRONMENT.trainer_rank(threads=1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in ENVIRONMENT.engine(threads=1)
