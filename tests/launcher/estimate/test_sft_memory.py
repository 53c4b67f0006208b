"""Memory of a supervised warm start on devices and on their hosts."""

import pytest

from launcher.checks.memory import sft_memory
from launcher.cluster.node import NodeResources
from launcher.config.schema import SftConfig
from launcher.estimate.device_memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from launcher.estimate.host_memory import GPU_PROCESS_BYTES
from launcher.estimate.tables import MemoryTable
from megatron_rl.memory import TRAINER_PROCESS_BYTES, num_parameters
from tests.launcher.estimate.runs import SPEC

HOSTED = {"distributed": True, "states_on_host": True}
NODE = NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(80 << 30,) * 8)


def config_of(**trainer: object) -> SftConfig:
    data = {"path": "x", "max_tokens": 4096}
    return SftConfig.model_validate({"model": "m", "output_dir": "o", "num_steps": 1, "data": data, "trainer": trainer})


def items(table: MemoryTable, phase: str) -> dict[str, int]:
    return {item.what: item.num_bytes for item in table.phases[phase]}


def test_a_device_has_a_context_and_a_communicator_for_each_kind_of_parallelism() -> None:
    device, _ = sft_memory(config_of(parallel={"tensor": 2, "data": 4}), SPEC, NODE).tables
    assert items(device, "train")["contexts and NCCL"] == CONTEXT_BYTES + 3 * COMMUNICATOR_BYTES
    (alone, _) = sft_memory(config_of(), SPEC, NODE).tables
    assert items(alone, "train")["contexts and NCCL"] == CONTEXT_BYTES


@pytest.mark.parametrize(("data", "ranks"), [(4, 4), (16, 8)])
def test_a_host_has_the_processes_of_its_ranks_and_their_pinned_states(data: int, ranks: int) -> None:
    _, host = sft_memory(config_of(parallel={"data": data}, optimizer=HOSTED), SPEC, NODE).tables
    found = items(host, "all phases")
    assert found["trainer processes"] == ranks * (TRAINER_PROCESS_BYTES + GPU_PROCESS_BYTES)
    states = 12 * num_parameters(SPEC) * ranks / data
    assert states <= found["pinned offload"] < 2 * states
    _, on_device = sft_memory(config_of(parallel={"data": data}), SPEC, NODE).tables
    assert "pinned offload" not in items(on_device, "all phases")


def test_a_host_that_is_too_small_for_gpu_processes_is_refused() -> None:
    small = NodeResources(cpu_cores=64, available_bytes=16 << 30, gpu_bytes=(80 << 30,) * 8)
    (problem,) = sft_memory(config_of(parallel={"data": 8}), SPEC, small).problems()
    assert problem.startswith("host of a node: controller + trainer: about 31.72 GiB are needed in `all phases`, but ")
    assert "16.00 GiB are available; the largest parts: change `trainer.parallel.data` (trainer processes: " in problem
    assert sft_memory(config_of(parallel={"data": 2}), SPEC, small).problems() == []
