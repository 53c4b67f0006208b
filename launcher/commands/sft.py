"""`megatron-rl sft`: supervised warm start with the trainer of runs; reads and writes Hugging Face directories."""

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import ray

from launcher.checks.check import CheckedSft
from launcher.checks.paths import WARM_START_MARKER
from launcher.cluster.processes import Processes, processes
from launcher.config.schema import SftConfig
from launcher.endings.conclusion import logs_beside
from launcher.errors import LaunchError, judging_user_input
from launcher.run_dir.atomic_files import replace_text
from launcher.run_dir.console import RunProgress
from launcher.run_dir.exported import replace_folder
from megatron_rl.batching.balance import PackingRules, load_kernels
from megatron_rl.batching.cost_model import cost_model
from megatron_rl.batching.sft_batch import SftBatch, sft_batches
from megatron_rl.config import AlgorithmConfig, PublishConfig
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import StepResult, TrainerSpec
from rollout.data.sft_rows import SftRows, load_sft_rows
from rollout.data.tokenizer import TokenizerSource
from rollout.failures import DeadlineError, Place
from rollout.weights.format import WeightFormat

READ_BYTES_S = 100_000
"""Bytes of a file that even a busy machine reads and tokenises in a second."""


def sft(checked: CheckedSft) -> None:
    """Train on the data of the configuration and write its `output_dir`."""
    config = checked.config
    ranks = checked.ranks
    placed = Counter([checked.nodes[0].name, *[rank.node for rank in ranks]])
    logs = logs_beside(Path(config.log_path or config.output_dir))
    with processes(
        config.cluster, num_actors=len(ranks) + 1, log_dir=logs, nodes=checked.nodes, placed=placed
    ) as running:
        rows_ref, rows = _load_rows(config, running)
        trainer = running.start_trainer(_spec(config), ranks)
        trainer.load_rows(rows_ref)
        progress = RunProgress(config.num_steps)
        progress.say(f"{len(rows.prompts)} rows, {sum(map(len, rows.responses))} response tokens")
        batches = sft_batches(
            rows.lengths(),
            [len(response) for response in rows.responses],
            batch_size=config.batch_size,
            num_steps=config.num_steps,
            rules=PackingRules(
                num_ranks=config.trainer.parallel.data,
                max_tokens=config.trainer.max_micro_batch_tokens,
                costs=cost_model(checked.spec, config.trainer),
            ),
            seed=config.seed,
        )
        learn(trainer, batches, _Log(config, progress))
        write_output(config, trainer)
        progress.say(f"wrote {config.output_dir}")


def learn(trainer: TrainerGroup, batches: Iterable[SftBatch], log: "_Log") -> None:
    """Take an optimizer step on every batch.

    Raises:
        LaunchError: every update was skipped, so the model has learned nothing.
    """
    updates = 0
    for step, batch in enumerate(batches):
        result = trainer.sft_step(batch)
        updates += result.num_optimizer_steps
        log.step(step, result, tokens=batch.num_tokens)
    if not updates:
        raise LaunchError(
            "every update was skipped, because no step had finite gradients: the model has learned nothing, and "
            "`output_dir` is as before; look for NaN in the weights of `model`, or try `trainer.dtype=fp32`"
        )


def write_output(config: SftConfig, trainer: TrainerGroup) -> None:
    """Replace `output_dir` by the trained weights, once all of them are on disk beside it."""
    target = Path(config.output_dir).resolve()

    def write(partial: Path) -> None:
        trainer.export(str(partial))
        made_of = {"model": config.model, "num_steps": config.num_steps}
        replace_text(partial / WARM_START_MARKER, json.dumps(made_of) + "\n")

    replace_folder(target, target.with_name(f"{WARM_START_MARKER}.{target.name}"), write)


def _load_rows(config: SftConfig, running: Processes) -> tuple[ray.ObjectRef, SftRows]:
    """Tokenise in a separate process, because transformers imports torch.

    Raises:
        LaunchError: the rows cannot be used.
        DeadlineError: they are not there after `trainer.timeout_s`, and a second more for each `READ_BYTES_S`.
    """
    source = TokenizerSource(directory=config.model, template_arguments=config.data.chat_template_arguments)
    ref = running.start_task(load_sft_rows, config.data.path, source, max_tokens=config.data.max_tokens)
    load_kernels()  # meanwhile: the task takes longer
    path = Path(config.data.path)
    deadline_s = config.trainer.timeout_s + path.stat().st_size / READ_BYTES_S
    try:
        with judging_user_input():
            return ref, ray.get(ref, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError as error:
        place = Place(role="reader of rows", node=running.nodes[0].name)
        raise DeadlineError(
            f"the controller waited {deadline_s:.0f} s (`trainer.timeout_s`, and a second for each "
            f"{READ_BYTES_S} bytes) for the {place} to tokenise {path}; raise it on a slow machine",
            place,
        ) from error


def _spec(config: SftConfig) -> TrainerSpec:
    return TrainerSpec(
        model=config.model,
        run_id=secrets.token_hex(4),
        config=config.trainer,
        algorithm=AlgorithmConfig(),
        publish=PublishConfig(),
        format=WeightFormat(name="bf16"),
        temperature=1.0,
        max_response_tokens=config.data.max_tokens,
        total_updates=config.num_steps,
        seed=config.seed,
    )


class _Log:
    """Prints a line every `log_every` steps and writes a row per step to `log_path`."""

    def __init__(self, config: SftConfig, progress: RunProgress) -> None:
        self._config = config
        self._progress = progress
        self._started = time.perf_counter()
        self._tokens = 0
        self._skipped = 0
        self._path = Path(config.log_path) if config.log_path else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def step(self, step: int, result: StepResult, *, tokens: int) -> None:
        """Record a finished step; a line has the updates that were skipped since the start."""
        metrics, skipped = result.metrics, result.num_skipped_updates
        self._tokens += tokens
        self._skipped += skipped
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics, "actor/skipped_updates": skipped}) + "\n")
        self._progress.phase("warm start", step + 1, self._config.num_steps)
        if (step + 1) % self._config.log_every == 0 or step + 1 == self._config.num_steps:
            elapsed = time.perf_counter() - self._started
            self._progress.say(
                f"step {step + 1}/{self._config.num_steps}  loss {metrics['sft/loss']:.4f}  "
                f"grad {metrics.get('actor/grad_norm', float('nan')):.2f}  lr {metrics['actor/lr']:.2e}  "
                f"{self._tokens / elapsed:.0f} tok/s  {elapsed:.0f} s{self._trouble()}"
            )

    def _trouble(self) -> str:
        count = self._skipped
        return f"  ! skipped {count} update{'s' if count > 1 else ''}" if count else ""
