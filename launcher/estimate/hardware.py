"""Figures of GPUs and of the nodes that they are sold in, from the vendor's datasheets.

Peaks are those of dense products; datasheets of Hopper and Blackwell print twice as much, with sparsity. Links are
bytes per second in one direction, half of what datasheets print. A network card is counted per GPU, as in the DGX
system of the same name.

Memory is what CUDA gives to processes. `nvidia-smi` lists more as total, and the driver reserves the rest. The H100's
was measured (`benchmarks/results/first_hour/first_hour.json`). The others are the least totals that were found in
public reports of torch running out of memory: 79.15 GiB on an A100, 139.72 on an H200, 178.35 on a B200.
"""

from dataclasses import dataclass

_GB, _TB = 10**9, 10**12
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: str
    capability: tuple[int, int]
    """Compute capability."""
    memory_bytes: int
    """Memory that CUDA gives to processes."""
    memory_bytes_s: float
    """Bandwidth of the device's memory."""
    bf16_flops: float
    """BF16 operations per second; a multiply-add counts as two."""
    fp8_flops: float
    """FP8 operations per second; 0 without FP8 products."""
    int8_flops: float
    """INT8 operations per second."""
    nvlink_bytes_s: float
    pcie_bytes_s: float
    nic_bytes_s: float
    """Network bandwidth of one GPU's share of its node."""
    host_bytes: int
    """Host memory of the DGX system."""
    source: str
    """Datasheets."""


GPUS = {
    "a100": Gpu(
        name="A100 80GB SXM",
        capability=(8, 0),
        memory_bytes=81_049 * _MIB,
        memory_bytes_s=2.039 * _TB,
        bf16_flops=312 * _TB,
        fp8_flops=0,
        int8_flops=624 * _TB,
        nvlink_bytes_s=300 * _GB,
        pcie_bytes_s=32 * _GB,
        nic_bytes_s=25 * _GB,
        host_bytes=2_000 * _GIB,
        source="NVIDIA A100 Tensor Core GPU datasheet; DGX A100 640GB datasheet",
    ),
    "h100": Gpu(
        name="H100 80GB SXM",
        capability=(9, 0),
        memory_bytes=85_017_493_504,
        memory_bytes_s=3.35 * _TB,
        bf16_flops=989.4 * _TB,
        fp8_flops=1_978.9 * _TB,
        int8_flops=1_978.9 * _TB,
        nvlink_bytes_s=450 * _GB,
        pcie_bytes_s=64 * _GB,
        nic_bytes_s=50 * _GB,
        host_bytes=2_000 * _GIB,
        source="NVIDIA H100 Tensor Core GPU datasheet; DGX H100 datasheet",
    ),
    "h200": Gpu(
        name="H200 141GB SXM",
        capability=(9, 0),
        memory_bytes=143_073 * _MIB,
        memory_bytes_s=4.8 * _TB,
        bf16_flops=989.4 * _TB,
        fp8_flops=1_978.9 * _TB,
        int8_flops=1_978.9 * _TB,
        nvlink_bytes_s=450 * _GB,
        pcie_bytes_s=64 * _GB,
        nic_bytes_s=50 * _GB,
        host_bytes=2_000 * _GIB,
        source="NVIDIA H200 Tensor Core GPU datasheet; DGX H200 datasheet",
    ),
    "b200": Gpu(
        name="B200 180GB SXM",
        capability=(10, 0),
        memory_bytes=182_630 * _MIB,
        memory_bytes_s=8 * _TB,
        bf16_flops=2_250 * _TB,
        fp8_flops=4_500 * _TB,
        int8_flops=4_500 * _TB,
        nvlink_bytes_s=900 * _GB,
        pcie_bytes_s=64 * _GB,
        nic_bytes_s=50 * _GB,
        host_bytes=2_000 * _GIB,
        source="NVIDIA Blackwell architecture brief and DGX B200 datasheet",
    ),
}
"""Known GPUs by the name that `--gpu` and `cluster.slurm.gpu` take."""
