"""Log-probabilities of a fixed prompt by Hugging Face, by the run's trainer and by its engines.

The processes of the run are started as `megatron-rl run` starts them, with its partition, its weight format and its
placement, but without a history. Three comparisons follow, and each has a line of its own:

1. Trainer and Hugging Face, with the trainer's own weights: the model was loaded and cut into shards correctly.
2. Engines and trainer, after a publish, which compares sums over all weights first: the engines hold these weights,
   and compute with them what the trainer computes, up to 8-bit rounding.
3. The same after a sleep and a second publish, if engines sleep (`engine.sleep_level`).
"""

import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from launcher.checks.check import CheckedRun
from launcher.checks.preflight import Check
from launcher.cluster.processes import Processes, processes
from launcher.commands.build import build_delivery, build_publisher, device_sharing, publish_plan
from launcher.commands.resume_point import ResumePoint
from launcher.commands.startup import Workers, start_workers
from launcher.run_dir.console import RunProgress
from megatron_rl.controller.colocation import DeviceSharing
from megatron_rl.controller.publish_refusal import PublishRefusedError
from megatron_rl.controller.publisher import Publisher, probe_tokens, spread
from rollout.types import WeightVersion

MAX_REFERENCE_GAP = {"fp32": 1e-3, "bf16": 0.1}
"""Mean absolute difference between trainer and Hugging Face, in nats per nat of the spread (`spread`), by
the dtype of the trainer. Two FP32 implementations differ in the order of their sums; BF16 has 8 bits in every layer."""

Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What the comparisons need once the processes have started."""

    workers: Workers
    publisher: Publisher
    sharing: DeviceSharing | None


def compare_log_probabilities(checked: CheckedRun, log_dir: Path, running: Processes | None = None) -> Iterator[Check]:
    """A line for each comparison, as soon as it is made.

    Args:
        checked: the run.
        log_dir: folder of the logs of the processes.
        running: a Ray cluster to start the processes on; None starts or joins the one of the configuration.

    Raises:
        CallError: a process failed or was late.
    """
    config = checked.config
    tokens = probe_tokens(checked.spec.vocab_size, config.publish.probe_tokens)
    from launcher.doctor.reference import reference_logprobs  # imports torch and transformers

    expected = reference_logprobs(config.model, tokens, config.trainer.dtype)
    with _cluster(checked, log_dir) if running is None else nullcontext(running) as cluster:
        compared = _start(checked, cluster)
        try:
            yield from _lines(checked, compared, tokens, expected)
        finally:
            cluster.end_trainer(compared.workers.trainer)
            cluster.end(compared.workers.engines.actors)


def _cluster(checked: CheckedRun, log_dir: Path) -> AbstractContextManager[Processes]:
    placement = checked.placement
    return processes(
        checked.config.cluster,
        num_actors=placement.num_actors,
        log_dir=log_dir,
        nodes=checked.nodes,
        placed=placement.num_actors_on,
        history=placement.history,
    )


def _start(checked: CheckedRun, running: Processes) -> Compared:
    run_id = secrets.token_hex(4)
    workers = start_workers(checked, running, ResumePoint(), run_id, RunProgress(0))
    plan = publish_plan(checked, workers)
    delivery = build_delivery(checked, workers, plan)
    delivery.connect()
    sharing = device_sharing(checked.config, workers.trainer, workers.engines)
    publisher = build_publisher(checked, workers, delivery, plan, sharing)
    return Compared(workers=workers, publisher=publisher, sharing=sharing)


def _lines(checked: CheckedRun, compared: Compared, tokens: list[int], expected: Logprobs) -> Iterator[Check]:
    config, trainer = checked.config, compared.workers.trainer
    timeout_s = config.publish.timeout_s
    own = trainer.probe(tokens, timeout_s=timeout_s).logprobs
    # FP8 parameters differ from the directory's weights by their rounding
    fp8 = config.trainer.fp8 == "blockwise_param"
    yield trainer_line(
        own,
        expected,
        bound=config.engine.probe_max_logprob_gap["fp8_block"] if fp8 else MAX_REFERENCE_GAP[config.trainer.dtype],
    )
    yield _publish_line("engines", compared, 0)
    if compared.sharing is not None and compared.sharing.sleep:
        compared.sharing.to_trainer()
        yield _publish_line("after sleep", compared, 1)


def trainer_line(own: Logprobs, expected: Logprobs, *, bound: float) -> Check:
    """The line of the trainer against Hugging Face. Pure.

    Args:
        own: log-probabilities by the trainer, [tokens - 1].
        expected: log-probabilities by Hugging Face, [tokens - 1].
        bound: largest mean absolute difference, in nats per nat of the spread of `expected`.
    """
    bound *= spread(expected)
    gap = float(np.abs(own.astype(np.float64) - expected).mean())
    wrong = (
        f"the bound is {bound:.3g} nats; the trainer does not compute what Hugging Face computes with these weights: "
        "do not train this model"
    )
    problem = "" if gap <= bound else wrong
    return Check(name="trainer", value=f"{gap:.2g} nats from Hugging Face, mean of {len(own)} tokens", problem=problem)


def _publish_line(name: str, compared: Compared, version: int) -> Check:
    """Publish the trainer's weights; the publisher compares weight sums and log-probabilities of every engine."""
    if compared.sharing is not None:
        compared.sharing.to_publish()
    try:
        report = compared.publisher.publish(WeightVersion(version))
    except PublishRefusedError as error:
        return Check(
            name=name, value="refused", problem=f"{error}; engines would sample from wrong weights: do not train"
        )
    return Check(
        name=name, value=f"{max(report.probe_gaps):.2g} nats from the trainer, largest of {len(report.probe_gaps)}"
    )
