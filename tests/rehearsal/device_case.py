"""The first stage of the first hour on a GPU."""

import json
import tempfile
from pathlib import Path

from launcher.first_hour import device
from tests.rehearsal.stages import stage


def measure(path: Path) -> None:
    device.ON_GPU = device.Sizes(num_bytes=1 << 22, side=256)
    assert device.main(["--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert {"bf16_flops", "int8_flops", "fp8_flops", "copy_bytes_s"} <= set(found["rates"]), found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage("facts and rates", lambda: measure(Path(folder) / "device.json"))


if __name__ == "__main__":
    main()
