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
    """Longest duration. A stage that was ended by then begins anew in the next call."""
    tests: tuple[str, ...] = ()
    """Files and folders of tests; those marked `gpu` run."""
    selected: str = ""
    """Expression of pytest's `-k`; empty selects all."""
    beside: bool = False
    """Whether the stage may run beside others: it measures neither durations nor the device's free memory."""
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
                "-v",  # a stage that runs out of time has a line for each finished test in its log
                "-m",
                "gpu",
                f"--junitxml={self.junit_path(folder)}",
                *(["-k", self.selected] if self.selected else []),
                *self.tests,
            ]
        return [sys.executable, "-m", self.module, "--json", str(self.record_path(folder)), *self.arguments]

    def junit_path(self, folder: Path) -> Path:
        """What pytest writes."""
        return folder / f"{self.name}.xml"

    def record_path(self, folder: Path) -> Path:
        """What a command writes."""
        return folder / f"{self.name}.record.json"


RUNS = "tests/end_to_end/test_run_gpu.py"

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
        limit_s=180.0,
        tests=(
            *("tests/rollout/worker/test_kernels_gpu.py", "tests/rollout/transports"),
            *("tests/megatron_rl/quantization", "tests/megatron_rl/algorithm"),
        ),
        beside=True,
    ),
    Stage(
        name="weights",
        decides="Does an engine that was given weights A, B and A answer like engines that have loaded them?",
        limit_s=420.0,
        tests=("tests/rollout/worker/test_formats_gpu.py", "tests/megatron_rl/weights/test_packer_gpu.py"),
        beside=True,
    ),
    Stage(
        name="experts",
        decides="The same for experts in 8 bits.",
        limit_s=420.0,
        tests=("tests/rollout/worker/test_experts_gpu.py",),
        beside=True,
    ),
    Stage(
        name="lossless",
        decides="Do drafts and CUDA graphs leave tokens and log-probabilities as they are?",
        limit_s=420.0,
        tests=("tests/rollout/worker/test_lossless.py", "tests/rollout/worker/test_sampler.py"),
        beside=True,
    ),
    Stage(
        name="trainer",
        decides="Are scores and gradients of the trainer close to Hugging Face's?",
        limit_s=300.0,
        tests=(
            *("tests/megatron_rl/model", "tests/megatron_rl/trainer/test_gradients_gpu.py"),
            "tests/megatron_rl/trainer/test_checkpoint.py",
        ),
        beside=True,
    ),
    Stage(
        name="trainer_fp8",
        decides="Are steps in FP8 close to steps in BF16, and are codes and masters right?",
        limit_s=300.0,
        tests=("tests/megatron_rl/trainer/test_fp8_gpu.py",),
        beside=True,
    ),
    *(
        Stage(
            name=f"runs_{name}",
            decides=f"Does the example train {what}, and how far is the sampler from the trainer?",
            limit_s=420.0,
            tests=(RUNS,),
            selected=selected,
            beside=True,
        )
        for name, what, selected in (
            ("bf16", "in BF16", "one_device and bf16"),
            ("int8", "in INT8", "one_device and int8"),
            ("fp8", "in FP8", "one_device and fp8"),
            ("turns", "while trainer and engine take turns", "take_turns"),
        )
    ),
    *(
        Stage(
            name=f"scores_{format}",
            decides=f"Do engines in {format} and trainer agree with Hugging Face, also after a sleep?",
            limit_s=300.0,
            tests=("tests/launcher/doctor/test_log_probabilities_gpu.py",),
            selected=format,
            beside=True,
        )
        for format in ("bf16", "int8", "fp8")
    ),
    Stage(
        name="kv_format",
        decides="Do scales of FP8 keys and values follow a publish in captured CUDA graphs?",
        limit_s=240.0,
        tests=("tests/rollout/engine/test_kv_format_gpu.py",),
        beside=True,
    ),
    Stage(
        name="sleep",
        decides="Does an engine that sleeps give all memory back, for 20 times, and answer as before?",
        limit_s=300.0,
        tests=("tests/rollout/engine/test_sleep_gpu.py",),
    ),
    Stage(
        name="publish",
        decides="How many seconds does a publish on one device take at the shapes of 7B and 32B?",
        limit_s=300.0,
        module="benchmarks.publish",
        arguments=("--device", "cuda", "--shapes", "7B", "32B"),
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
