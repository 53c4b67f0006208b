"""Memory of a supervised warm start on devices and on their hosts."""

from dataclasses import replace

import pytest

from launcher.checks.memory import sft_memory
from launcher.cluster.node import NodeResources
from launcher.config.schema import SftConfig
from launcher.estimate.device_memory import COMMUNICATOR_BYTES, CONTEXT_BYTES
from launcher.estimate.host_memory import GPU_PROCESS_BYTES
from launcher.estimate.tables import MemoryTable, gib
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
    assert "16.00 GiB are available; `trainer.parallel.data` = 4 frees " in problem
    assert sft_memory(config_of(parallel={"data": 2}), SPEC, small).problems() == []


AMPERE = replace(NODE, gpu_capability=(8, 0))
LONG = {"parallel": {"tensor": 2, "data": 4}, "max_micro_batch_tokens": 32768}


def test_a_warm_start_that_does_not_fit_for_scores_names_what_frees_them() -> None:
    (problem,) = sft_memory(config_of(**LONG), SPEC, AMPERE).problems()
    assert "`trainer.recompute` = selective frees " in problem
    selective = sft_memory(config_of(**LONG, recompute="selective"), SPEC, AMPERE).tables[0]
    freed = sft_memory(config_of(**LONG), SPEC, AMPERE).tables[0].needed_bytes - selective.needed_bytes
    assert f"`trainer.recompute` = selective frees {gib(freed)}" in problem


def test_a_warm_start_with_flash_attention_holds_no_scores() -> None:
    fused = sft_memory(config_of(**LONG), SPEC, AMPERE, flash_attention="2.8.3")
    assert fused.problems() == []
    assert "trainer attention scores" not in items(fused.tables[0], "train")
    assert "trainer attention scores" in items(sft_memory(config_of(**LONG), SPEC, AMPERE).tables[0], "train")


def test_a_change_that_another_check_refuses_is_not_named() -> None:
    small = NodeResources(cpu_cores=64, available_bytes=1 << 40, gpu_bytes=(8 << 30,) * 4)
    odd = replace(SPEC, num_heads=9, num_kv_heads=3)
    (problem,) = sft_memory(config_of(parallel={"data": 4}), odd, small).problems()
    assert "`trainer.recompute` = full frees " in problem and "`trainer.parallel.tensor`" not in problem
    (problem,) = sft_memory(config_of(parallel={"data": 4}), SPEC, small).problems()
    assert "`trainer.parallel.tensor` = 2 with data = 2 frees " in problem
