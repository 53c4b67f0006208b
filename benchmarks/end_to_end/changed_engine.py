"""The command line of this project, with engines that sample or draft in another way.

`python -m benchmarks.end_to_end.changed_engine CHANGE run rl.yaml key=value ...`. Ray calls `setup` in each process
that it starts; in an engine's process it replaces names before the engine is built. Changes:

    vllm_sampler   the engine samples with vLLM's own sampler
    other_history  responses are filed under another prompt, so a prompt drafts from that prompt's history; no ring
    no_history     responses are filed under no prompt of the run; no ring
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollout.processes import VARIABLE

CHANGE = "END_TO_END_CHANGE"
"""Environment variable with the change, for the processes that Ray starts."""
SIGN = "this engine is changed by benchmarks.end_to_end"
"""Line in the log of a changed engine."""
_WORKERS = "benchmarks.end_to_end.changed_workers"


def setup() -> None:
    """Make the change, if this process is an engine's."""
    if Path(os.environ.get(VARIABLE, "")).stem.startswith("engine-"):
        make(os.environ[CHANGE])


def make(change: str) -> None:
    """Replace the names that a change concerns."""
    from history.types import prompt_key as key_of
    from rollout.engine import history_sender, vllm_args

    if change == "vllm_sampler":
        vllm_args.WORKER = f"{_WORKERS}.StockSamplerWorker"
        return
    vllm_args.PROPOSER = f"{_WORKERS}.RinglessProposer"
    file_under = neighbour if change == "other_history" else nobody
    history_sender.prompt_key = lambda prompt_id: key_of(file_under(prompt_id))  # type: ignore[attr-defined]


def neighbour(prompt_id: str) -> str:
    """The prompt that swaps its history with this one; files have an even number of prompts."""
    name, _, number = prompt_id.rpartition("/")
    return f"{name}/{int(number) ^ 1}"


def nobody(prompt_id: str) -> str:
    """An id that no prompt has."""
    return f"nobody/{prompt_id}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit code."""
    from launcher import cli
    from launcher.cluster import ray_cluster

    change, *rest = sys.argv[1:] if argv is None else argv
    os.environ[CHANGE] = change
    hook = {"worker_process_setup_hook": f"{__spec__.name}.{setup.__name__}"}
    ray_cluster._init = partial(ray_cluster._init, runtime_env=hook)
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main())
