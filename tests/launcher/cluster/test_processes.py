"""Environment of started processes."""

from pathlib import Path

import pytest

from launcher.cluster.processes import Processes
from rollout.processes import HEAP, ProcessEnv

ENVIRONMENT = ProcessEnv(single_node=True)


def test_allocator_settings_of_the_environment_override_the_defaults_of_engines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in HEAP:
        monkeypatch.delenv(name, raising=False)
    running = Processes(environment=ENVIRONMENT, log_dir=tmp_path, num_gpus_per_engine_rank=0)
    found = running._variables(ENVIRONMENT.engine(threads=1), "engine-0")
    assert HEAP.items() <= found.items() and found["MEGATRON_RL_LOG"] == str(tmp_path / "engine-0.log")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    found = running._variables(ENVIRONMENT.engine(threads=1), "engine-0")
    assert found.items() >= (HEAP | {"MALLOC_TRIM_THRESHOLD_": "4096"}).items()
    # only engines have a heap of their own
    assert not HEAP.keys() & running._variables(ENVIRONMENT.trainer_rank(threads=1), "trainer-0").keys()
