from typing import get_args

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
    assert {name: round(gpu.memory_bytes / 2**30) for name, gpu in GPUS.items()} == {
        "a100": 80,
        "h100": 80,
        "h200": 140,
        "b200": 179,
    }
