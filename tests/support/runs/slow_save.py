"""`python -m launcher`, whose saves take a second longer, so that a test can kill it during a save."""

import sys
import time
from pathlib import Path

from launcher.cli import main
from launcher.run_dir import checkpoints

sync = checkpoints.sync_tree


def sync_late(path: Path) -> None:
    time.sleep(1.0)
    sync(path)


if __name__ == "__main__":
    checkpoints.sync_tree = sync_late
    sys.exit(main())
