"""Both INT8 kernels multiply the same codes, or the record says why one of them does not run."""

import json
from pathlib import Path

import torch

from benchmarks.publish import int8_kernels


def test_both_kernels_are_measured_on_the_same_codes(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    assert int8_kernels.main(["--json", str(record), "--quick"]) == 0
    found = json.loads(record.read_text(encoding="utf-8"))
    products = [row for row in found["rows"] if row["what"] == "multiply"]
    has_both = torch.cpu._is_vnni_supported() and torch.cpu._is_avx512_bf16_supported()
    assert len(products) == 2 * 3 * has_both
    assert all(0 < row["error"] < 0.02 for row in products)  # 8 bits round that much
    assert any("AVX-512" in reason for reason in found["not_measured"]) != has_both
