"""Checkpoints of a run of this project as Hugging Face directories, all of them in one process.

`python -m benchmarks.end_to_end.exported RUN_DIR OUT` writes `OUT/<step>` for each checkpoint. `megatron-rl export`
does the same for one checkpoint and starts a Ray of its own each time.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.commands.specs import trainer_spec
from launcher.config.loading import load
from launcher.config.schema import RunConfig
from launcher.run_dir.checkpoints import Checkpoints
from rollout.weights.format import WeightFormat


def export_all(run_dir: Path, out: Path) -> None:
    """Export every checkpoint of a run with a trainer of one rank. ValueError: a checkpoint is not finished."""
    from torch._C._distributed_c10d import HashStore

    from megatron_rl.cpu import shim

    shim.install()  # before the first Megatron module
    from megatron_rl.config import ParallelConfig
    from megatron_rl.model import parallel
    from megatron_rl.trainer.saves import SavedPolicy

    config = load(RunConfig, run_dir / "config.yaml", [])
    spec = trainer_spec(config, WeightFormat.of(config.engine), "export")
    folder = run_dir / "checkpoints"
    position = parallel.initialize(ParallelConfig(), rank=0, store=HashStore(), timeout_s=60, seed=0)
    try:
        for step in Checkpoints(folder).steps():
            saved = SavedPolicy(replace(spec, exports=str(folder / str(step) / "trainer")), position)
            saved.export(str(out / str(step)))
    finally:
        parallel.destroy()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    run_dir, out = map(Path, sys.argv[1:] if argv is None else argv)
    export_all(run_dir, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
