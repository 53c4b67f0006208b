"""`python -m launcher` with a defect: a warm start divides by zero when its processes have begun to start."""

import sys

from launcher.cli import main
from launcher.commands import sft


def load_kernels() -> None:
    print(1 // 0)


if __name__ == "__main__":
    sft.load_kernels = load_kernels
    sys.exit(main())
