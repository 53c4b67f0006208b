"""Asks vLLM about the arguments of its engine (`engine.vllm`), in another process: this one does not import vLLM."""

import json
import os
import subprocess
import sys
from functools import cache

from launcher.cluster.slurm_step import in_allocation
from launcher.config.schema import RunConfig
from rollout.config import EngineConfig
from rollout.processes import ProcessEnv

ARGUMENT_CHECK = ("-m", "rollout.engine.argument_check")
ARGUMENT_TIMEOUT_S = 600.0
"""Deadline of importing vLLM."""


def run_arguments(config: RunConfig) -> tuple[list[str], list[str]]:
    """Problems and warnings of a run's arguments.

    The container of a job may have another vLLM than this machine. So outside the job a problem is a warning.
    """
    problems, warnings = engine_arguments(config.engine)
    if config.cluster.slurm.container.kind == "none" or in_allocation():
        return problems, warnings
    return [], [*(f"{problem} (of this machine's vLLM; the container's decides)" for problem in problems), *warnings]


def engine_arguments(config: EngineConfig) -> tuple[list[str], list[str]]:
    """Problems of arguments, a sentence for each key; or a warning if vLLM cannot be asked here."""
    if not config.vllm:
        return [], []
    problems, warning = _asked(json.dumps(config.vllm))
    return list(problems), [warning] if warning else []


@cache
def _asked(table: str) -> tuple[tuple[str, ...], str]:
    """Problems of a table, or the warning. The guard checks the same table with several formats: it is asked once."""
    try:
        done = subprocess.run(
            [sys.executable, *ARGUMENT_CHECK],
            input=table,
            env={**os.environ, **ProcessEnv(single_node=True).engine(threads=1)},
            capture_output=True,
            text=True,
            timeout=ARGUMENT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer after {ARGUMENT_TIMEOUT_S:.0f} s"
    else:
        if done.returncode == 0:
            return tuple(json.loads(done.stdout.strip().splitlines()[-1])), ""
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return (), f"`engine.vllm` is not checked, because vLLM cannot be imported here: {reason}"
