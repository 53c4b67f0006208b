import json
from pathlib import Path
from typing import get_args

import pytest

from launcher.cluster.node import RESERVED_BYTES, JobGpu
from launcher.config.slurm import SlurmConfig
from launcher.estimate.hardware import GPUS


def test_the_configuration_names_every_gpu() -> None:
    assert set(get_args(SlurmConfig.model_fields["gpu"].annotation)) == {"", *GPUS}


def test_peaks_are_those_of_dense_products_and_links_of_one_direction() -> None:
    for gpu in GPUS.values():
        assert gpu.source.startswith("NVIDIA")
        assert abs(gpu.int8_flops / gpu.bf16_flops - 2) < 0.01
        assert gpu.fp8_flops in (0, gpu.int8_flops)
        assert gpu.memory_bytes_s > gpu.nvlink_bytes_s > gpu.pcie_bytes_s >= gpu.nic_bytes_s
    assert [GPUS[name].fp8_flops > 0 for name in ("a100", "h100", "h200", "b200")] == [False, True, True, True]


def test_memory_is_what_cuda_gives_and_less_than_the_driver_lists() -> None:
    """`nvidia-smi` lists 480 to 871 MiB more. GPUs of an unknown kind have no more than any known one."""
    stages = json.loads(Path("benchmarks/results/first_hour/first_hour.json").read_text(encoding="utf-8"))
    measured = next(stage["record"]["facts"] for stage in stages if stage["stage"] == "device")
    (gpu,) = (gpu for name, gpu in GPUS.items() if name.upper() in measured["name"])
    assert gpu.memory_bytes == pytest.approx(measured["memory_bytes"], rel=1e-3)
    listed_mib = {"a100": 81_920, "h100": 81_559, "h200": 143_771, "b200": 183_359}
    reserved_mib = {name: listed_mib[name] - gpu.memory_bytes / 2**20 for name, gpu in GPUS.items()}
    assert all(480 <= reserved <= RESERVED_BYTES / 2**20 for reserved in reserved_mib.values()), reserved_mib
    assert JobGpu().memory_bytes <= min(gpu.memory_bytes for gpu in GPUS.values())
