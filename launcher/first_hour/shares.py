"""Shares of the datasheet's peaks that a device reaches, from the results of the first hour. Pure.

They are inputs of `megatron-rl plan` (`--product-share`, `--bandwidth-share`) and of `benchmarks.at_scale --shares`. A
plain copy reads and writes each byte once, so the device's memory moves twice the bytes that are copied. Products and
copies are ceilings: whole steps reach less. What was not measured is None.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.estimate.hardware import GPUS, Gpu
from launcher.first_hour.results import Result
from launcher.run_dir.atomic_files import replace_text

SHARES = "shares.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one kind of GPU reaches."""

    gpu: str
    """Key of `launcher.estimate.hardware.GPUS`."""
    product_share: float
    """Of BF16 products."""
    eight_bit_product_share: float | None
    """Of FP8 products, or of INT8 ones on a device without FP8."""
    bandwidth_share: float
    """Of the device's memory."""
    host_share: float
    """Of the link between host and device; the slower of both directions."""
    forward_overhead_s: float | None
    """Seconds of an engine's forward of one row beside the reading of its weights; the smallest over formats."""


def shares(results: Sequence[Result]) -> Shares | None:
    """The shares in these results; None if the first stage has not passed, or the kind of GPU is unknown."""
    records = {each.stage: each.record for each in results if each.outcome == "passed"}
    device = next((each.device for each in results if each.device), "")
    known = next((key for key in GPUS if key.upper() in device.upper()), None)
    record = records.get("device")
    rates = record.get("rates") if isinstance(record, Mapping) else None
    if known is None or not isinstance(rates, Mapping):
        return None
    gpu, reached = GPUS[known], {str(name): float(value) for name, value in rates.items()}
    copy_bytes_s = 2 * reached["copy_bytes_s"]
    return Shares(
        gpu=known,
        product_share=reached["bf16_flops"] / gpu.bf16_flops,
        eight_bit_product_share=_eight_bit(reached, gpu),
        bandwidth_share=copy_bytes_s / gpu.memory_bytes_s,
        host_share=min(reached["host_to_device_bytes_s"], reached["device_to_host_bytes_s"]) / gpu.pcie_bytes_s,
        forward_overhead_s=_overhead_s(records.get("step_time"), copy_bytes_s),
    )


def _eight_bit(reached: Mapping[str, float], gpu: Gpu) -> float | None:
    if gpu.fp8_flops and "fp8_flops" in reached:
        return reached["fp8_flops"] / gpu.fp8_flops
    return reached["int8_flops"] / gpu.int8_flops if "int8_flops" in reached else None


def _overhead_s(record: object, memory_bytes_s: float) -> float | None:
    """From forwards of one row without drafts at the shortest context, whose keys and values are negligible."""
    rows = record.get("rows") if isinstance(record, Mapping) else None
    plain = [row for row in rows or () if row["engine"] == "stock" and row["num_rows"] == 1 and "weight_bytes" in row]
    if not plain:
        return None
    shortest = min(row["num_context_tokens"] for row in plain)
    at_shortest = [row for row in plain if row["num_context_tokens"] == shortest]
    return max(0.0, min(float(row["seconds"] - row["weight_bytes"] / memory_bytes_s) for row in at_shortest))


def write_shares(folder: Path, results: Sequence[Result]) -> None:
    """Write `FOLDER/shares.json`, unless the results have no shares."""
    if (found := shares(results)) is not None:
        replace_text(folder / SHARES, json.dumps(asdict(found), indent=1) + "\n")


def read_shares(path: Path) -> Shares:
    """What `write_shares` has written.

    Raises:
        OSError: the file cannot be read.
        TypeError: the file is of another version of the program.
    """
    return Shares(**json.loads(path.read_text(encoding="utf-8")))
