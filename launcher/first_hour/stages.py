"""What is run in the first hour on a GPU, in which order, and what each stage decides. Pure.

A stage is a set of tests marked `gpu`, or a command that writes a record. An earlier stage decides whether a later one
means anything: the speed of kernels that compute wrong products is of no use.
"""

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One process with a time limit; either `tests` or `module` is given."""

    name: str
    decides: str
    """The question that the stage answers."""
    limit_s: float
    """Longest duration. What has not been measured by then is left for another call."""
    tests: tuple[str, ...] = ()
    """Files and folders of tests; those marked `gpu` run."""
    module: str = ""
    """Module of a command that takes `--json OUT`."""
    arguments: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        """Command line; it writes `record_path` or `junit_path` of the same folder."""
        if self.tests:
            return [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                f"--junitxml={self.junit_path(folder)}",
                *self.tests,
            ]
        return [sys.executable, "-m", self.module, "--json", str(self.record_path(folder)), *self.arguments]

    def junit_path(self, folder: Path) -> Path:
        """What pytest writes."""
        return folder / f"{self.name}.xml"

    def record_path(self, folder: Path) -> Path:
        """What a command writes."""
        return folder / f"{self.name}.record.json"


STAGES = (
    Stage(
        name="device",
        decides="What is this device, and how fast are plain copies and products on it?",
        limit_s=90.0,
        module="launcher.first_hour.device",
    ),
    Stage(
        name="kernels",
        decides="Do the products in 8 bits equal the products of the decoded values?",
        limit_s=120.0,
        tests=("tests/rollout/worker/test_kernels_gpu.py", "tests/rollout/transports/test_transports_gpu.py"),
    ),
    Stage(
        name="weights",
        decides="Does an engine that was given weights A, B and A answer like engines that have loaded them?",
        limit_s=360.0,
        tests=(
            "tests/rollout/worker/test_formats_gpu.py",
            "tests/rollout/worker/test_experts_gpu.py",
            "tests/megatron_rl/weights/test_packer_gpu.py",
        ),
    ),
    Stage(
        name="lossless",
        decides="Do drafts and CUDA graphs leave tokens and log-probabilities as they are?",
        limit_s=360.0,
        tests=("tests/rollout/worker/test_lossless.py", "tests/rollout/worker/test_sampler.py"),
    ),
    Stage(
        name="trainer",
        decides="Are scores and steps in BF16 and FP8 close to the reference?",
        limit_s=300.0,
        tests=("tests/megatron_rl/model/test_model_gpu.py", "tests/megatron_rl/trainer/test_fp8_gpu.py"),
    ),
    Stage(
        name="runs",
        decides="Does the example train in every format, and how far is the sampler from the trainer?",
        limit_s=600.0,
        tests=("tests/end_to_end/test_run_gpu.py",),
    ),
    Stage(
        name="publish",
        decides="How many seconds does a publish on one device take at the shapes of 7B and 32B?",
        limit_s=300.0,
        module="benchmarks.publish",
        arguments=("--device", "cuda", "--shapes", "7B", "32B"),
    ),
    Stage(
        name="sleep",
        decides="Does an engine that sleeps give all memory back, for 20 times, and answer as before?",
        limit_s=420.0,
        tests=("tests/rollout/engine/test_sleep_gpu.py", "tests/launcher/doctor/test_log_probabilities_gpu.py"),
    ),
    Stage(
        name="step_time",
        decides="How long is a forward by rows, drafted tokens, context and format, beside CUDA graphs?",
        limit_s=900.0,
        module="benchmarks.rollout.step_time",
        arguments=("--device", "cuda", "--models", "7B"),
    ),
    Stage(
        name="sampling",
        decides="What does the sampler cost beside vLLM's?",
        limit_s=180.0,
        module="benchmarks.rollout.sampling",
        arguments=("--device", "cuda"),
    ),
    Stage(
        name="suite",
        decides="Do all tests pass that need a GPU?",
        limit_s=1800.0,
        tests=("tests",),
    ),
)
