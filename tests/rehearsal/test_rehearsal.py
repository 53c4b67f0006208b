"""Cases on stub devices. They run in the environment of GPU machines (`make rehearse`) and take about forty minutes."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.rehearsal.stages import rows_of
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT
from tests.support.stub_cuda.build import SOURCES, build, environment
from tests.support.stub_cuda.stand_ins import NOTES

pytestmark = pytest.mark.rehearsal


COLOCATED = ("trainer.parallel.tensor=2", "engine.tensor_parallel=2")
DISAGGREGATED = (
    "placement.mode=disaggregated",
    "trainer.parallel.tensor=2",
    "planner.overlap=1",
    "planner.max_staleness=1",
)
EIGHT_COLOCATED = (
    *("trainer.parallel.tensor=2", "trainer.parallel.data=4", "trainer.optimizer.distributed=true"),
    *("engine.num_engines=4", "engine.tensor_parallel=2", "evaluation.bf16_before_after=false"),
)
"""Engines start once, as sixteen processes take most of the time limit to start."""
EIGHT_DISAGGREGATED = (
    *DISAGGREGATED,
    *("trainer.parallel.pipeline=2", "engine.num_engines=2", "engine.tensor_parallel=2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A script of this folder, and what it runs on."""

    script: str
    arguments: Sequence[str] = ()
    num_devices: int = 1
    computes: bool = False
    """Kernels compute, on the host."""
    reuses_memory: bool = False
    """Torch keeps freed memory, which CUDA IPC needs. A new tensor is not zero then, although no kernel fills it."""
    memory_gib: int = 0
    """Memory and swap space that the checks of the case's run ask for."""


def engine(format: str, *, drafts: bool = True, sleep: int = 0, eager: bool = True, kv_format: str = "bf16") -> Case:
    return Case(script="engine_case", arguments=(format, str(int(drafts)), str(sleep), str(int(eager)), kv_format))


def numbers(format: str, *, family: str = "blocks", sleep: int = 0, kv_format: str = "bf16") -> Case:
    return Case(script="numbers_case", arguments=(family, format, str(sleep), kv_format), computes=True)


def trainer(fp8: str, format: str, recompute: str = "none", *, family: str = "blocks") -> Case:
    return Case(script="trainer_case", arguments=(family, fp8, format, recompute))


def ranks(family: str, way: str, *, num_devices: int) -> Case:
    return Case(script="ranks_case", arguments=(family, way), num_devices=num_devices)


def run(format: str, transport: str, *overrides: str, num_devices: int = 1, memory_gib: int = 0) -> Case:
    return Case(
        script="run_case",
        arguments=(format, transport, *overrides),
        num_devices=num_devices,
        memory_gib=memory_gib,
    )


def gpu_tests(path: str, expression: str, **on: int) -> Case:
    return Case(script="tests_case", arguments=(path, expression), **on)


TRANSPORTS = "tests/rollout/transports/test_transports_gpu.py"
REGIONS = "tests/rollout/transports/test_cuda_ipc_gpu.py"
CASES: dict[str, Case] = {
    "imports": Case(script="import_case"),
    "waits for a device": Case(script="wait_case"),
    "first hour, facts of the device": Case(script="device_case"),
    **{
        f"configurations of engines of {model}": Case(script="config_case", arguments=(model,), num_devices=8)
        for model in ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen3-32B", "Qwen3-30B-A3B")
    },
    "engine bf16, eager": engine("bf16", drafts=False),
    "engine bf16, drafts and CUDA graphs": engine("bf16", eager=False),
    "engine int8, drafts": engine("int8"),
    "engine fp8_block, drafts": engine("fp8_block"),
    "engine fp8_channel, drafts, CUDA graphs, sleep level 2": engine("fp8_channel", sleep=2, eager=False),
    "engine int8, FP8 keys and values, drafts, CUDA graphs": engine("int8", eager=False, kv_format="fp8"),
    "numbers of an engine in bf16, drafts": numbers("bf16"),
    "numbers of an engine in int8, drafts, sleep level 2": numbers("int8", sleep=2),
    "numbers of an engine in int8, FP8 keys and values, drafts": numbers("int8", kv_format="fp8"),
    "numbers of an engine in fp8_channel, drafts": numbers("fp8_channel"),
    "numbers of an engine in fp8_block, drafts": numbers("fp8_block"),
    "numbers of an engine with experts in bf16, drafts": numbers("bf16", family="experts"),
    "numbers of an engine with experts in fp8_channel, drafts": numbers("fp8_channel", family="experts"),
    "numbers of an engine with experts in fp8_channel, drafts, sleep level 2": numbers(
        "fp8_channel", family="experts", sleep=2
    ),
    "trainer bf16": trainer("none", "bf16"),
    "trainer bf16 with experts": trainer("none", "bf16", family="expert_blocks"),
    "trainer bf16 with experts, recompute": trainer("none", "bf16", "full", family="expert_blocks"),
    "trainer bf16 to int8": trainer("none", "int8"),
    "trainer bf16 to fp8_channel, recompute": trainer("none", "fp8_channel", "full"),
    "trainer blockwise to fp8_block": trainer("blockwise", "fp8_block"),
    "trainer blockwise_param to fp8_block": trainer("blockwise_param", "fp8_block"),
    "run bf16 through shared memory": run("bf16", "shm"),
    "run int8 through shared memory": run("int8", "shm"),
    "run int8, sleep and offload": run("int8", "shm", "engine.sleep_level=2", "trainer.offload=all"),
    "run fp8_block through gloo": run("fp8_block", "gloo"),
    "NCCL between four processes": Case(script="nccl_case", arguments=("4",), num_devices=4),
    "CUDA IPC between processes": gpu_tests(TRANSPORTS, "mapped", reuses_memory=True),
    "CUDA IPC to two processes, of which one dies": gpu_tests(REGIONS, "region", reuses_memory=True),
    "two trainer ranks to colocated engine ranks": ranks("blocks", "colocated", num_devices=2),
    "two trainer ranks to a chain of two engines": ranks("blocks", "chain", num_devices=6),
    "two trainer ranks with experts to colocated engine ranks": ranks("expert_blocks", "colocated", num_devices=2),
    "a publish over NCCL": gpu_tests(TRANSPORTS, "nccl and not True", num_devices=2),
    "run int8 colocated on two devices": run("int8", "cuda_ipc", *COLOCATED, num_devices=2),
    "run int8 disaggregated on three devices": run("int8", "nccl", *DISAGGREGATED, num_devices=3),
    "run int8 colocated on eight devices": run("int8", "cuda_ipc", *EIGHT_COLOCATED, num_devices=8, memory_gib=67),
    "run int8 disaggregated on eight devices": run("int8", "nccl", *EIGHT_DISAGGREGATED, num_devices=8, memory_gib=35),
}


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stub_cuda")
    build(target)
    return target


@pytest.mark.parametrize("name", CASES)
def test_a_case_passes_every_stage(stub: Path, tmp_path: Path, name: str, record_property) -> None:
    case = CASES[name]
    room = (psutil.virtual_memory().total + psutil.swap_memory().total) >> 30
    assert room >= case.memory_gib, (
        f"{name!r} needs {case.memory_gib} GiB, but memory and swap space are {room} GiB: add swap space"
    )
    paths = f"{SOURCES / 'site'}:{ROOT}"
    chosen = environment(
        stub,
        num_devices=case.num_devices,
        path=os.environ["PATH"],
        reuses_memory=case.reuses_memory,
        computes=case.computes,
    )
    notes = tmp_path / "stood_in_for"
    notes.mkdir()
    variables = {**os.environ, **chosen, "PYTHONPATH": paths, NOTES: str(notes)}
    with (tmp_path / "output").open("w+", encoding="utf-8") as output:
        subprocess.run(
            [sys.executable, "-m", f"tests.rehearsal.{case.script}", *case.arguments],
            env=variables,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
        output.seek(0)
        text = output.read()
    rows = rows_of(text)
    record_property("stages", len(rows))
    record_property("stood_in_for", ", ".join(sorted(note.name for note in notes.iterdir())))
    faults = [f"{row['stage']}: {row['fault']}" for row in rows if row["fault"]]
    assert rows and not faults, "\n".join([*faults, text[-6000:]])
