"""Cases on stub devices. They run in the environment of GPU machines (`make rehearse`) and take about ten minutes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.stages import rows_of
from tests.support.deadline import DEADLINE_S
from tests.support.runs.background import ROOT
from tests.support.stub_cuda.build import SOURCES, build, environment

pytestmark = pytest.mark.rehearsal

CASES: dict[str, list[str]] = {
    "imports": ["import_case"],
    "first hour, facts of the device": ["device_case"],
    "engine bf16, eager": ["engine_case", "bf16", "0", "0", "1"],
    "engine bf16, drafts and CUDA graphs": ["engine_case", "bf16", "1", "0", "0"],
    "engine int8, drafts": ["engine_case", "int8", "1", "0", "1"],
    "engine fp8_block, drafts": ["engine_case", "fp8_block", "1", "0", "1"],
    "engine fp8_channel, drafts, CUDA graphs, sleep level 2": ["engine_case", "fp8_channel", "1", "2", "0"],
    "trainer bf16 to int8": ["trainer_case", "none", "int8", "none"],
    "trainer bf16 to fp8_channel, recompute": ["trainer_case", "none", "fp8_channel", "full"],
    "trainer blockwise to fp8_block": ["trainer_case", "blockwise", "fp8_block", "none"],
    "trainer blockwise_param to fp8_block": ["trainer_case", "blockwise_param", "fp8_block", "none"],
    "run bf16 through shared memory": ["run_case", "bf16", "shm"],
    "run int8 through shared memory": ["run_case", "int8", "shm"],
    "run int8, sleep and offload": ["run_case", "int8", "shm", "engine.sleep_level=2", "trainer.offload=all"],
    "run fp8_block through gloo": ["run_case", "fp8_block", "gloo"],
}


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("stub_cuda")
    build(target)
    return target


@pytest.mark.parametrize("name", CASES)
def test_a_case_passes_every_stage(stub: Path, tmp_path: Path, name: str, record_property) -> None:
    module, *arguments = CASES[name]
    paths = f"{SOURCES / 'site'}:{ROOT}"
    variables = {**os.environ, **environment(stub, num_devices=1, path=os.environ["PATH"]), "PYTHONPATH": paths}
    with (tmp_path / "output").open("w+", encoding="utf-8") as output:
        subprocess.run(
            [sys.executable, "-m", f"tests.rehearsal.{module}", *arguments],
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
    faults = [f"{row['stage']}: {row['fault']}" for row in rows if row["fault"]]
    assert rows and not faults, "\n".join([*faults, text[-6000:]])
