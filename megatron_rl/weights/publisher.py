"""Sequences one publish: check, deliver, prove, resume.

The controller's side; no torch, no bytes. The order is decision 3's: every engine accepts the manifest
before a byte is sent; the link brings the buckets over, and engines verify before they apply; the probe
compares each engine's log-probabilities with the trainer's own under the same codes; only then the
engine serves the new version. Whatever goes wrong is raised with the engine or rank named; an engine
that could not prove itself stays fenced: no token is sampled from weights that nobody vouches for.
"""

import time

import numpy as np

from megatron_rl.probe_prompt import probe_tokens
from megatron_rl.results import ProbeResult
from megatron_rl.trainer_group import TrainerGroup
from megatron_rl.weights.code_sums import together
from megatron_rl.weights.links import Link
from megatron_rl.weights.publish_report import PublishReport
from megatron_rl.weights.reshard import ReshardPlan
from rollout.engine_group import EngineGroup
from rollout.types import WeightVersion


class Publisher:
    """Publishes the trainer's weights to all engines of a run."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        link: Link,
        *,
        plan: ReshardPlan,
        run_id: str,
        vocab_size: int,
        probe_length: int,
        max_probe_gap: float,
        timeout_s: float,
    ) -> None:
        """`plan` is the trainer's own (`plan_reshard` of the same arguments); `max_probe_gap` in nats."""
        self._trainer = trainer
        self._engines = engines
        self._link = link
        self._plan = plan
        self._run_id = run_id
        self._probe_tokens = probe_tokens(vocab_size, probe_length)
        self._max_probe_gap = max_probe_gap
        self._timeout_s = timeout_s

    def publish(self, policy_version: int) -> PublishReport:
        """Bring every engine to `policy_version`; returns when all of them serve it.

        Raises:
            RuntimeError: a rank or an engine refused, failed, was late, or did not pass the probe.
        """
        version = WeightVersion(policy_version)
        manifest = self._plan.manifest(self._run_id, version)
        self._engines.call("check", manifest, timeout_s=self._timeout_s)
        started = time.perf_counter()
        delivery = self._link.deliver(manifest)
        delivered = time.perf_counter()
        gaps = self._prove(version)
        self._engines.call("resume", timeout_s=self._timeout_s)
        return PublishReport(
            weight_version=version,
            wire_bytes=sum(part.num_bytes for part in delivery.staged),
            scales_s=max(part.scales_s for part in delivery.staged),
            pack_s=max(part.pack_s for part in delivery.staged),
            send_s=max(part.send_s for part in delivery.staged),
            pause_s=max(update.pause_s for update in delivery.updates),
            apply_s=max(update.apply_s for update in delivery.updates),
            deliver_s=delivered - started,
            probe_s=time.perf_counter() - delivered,
            probe_gaps=gaps,
            codes=together(part.codes for part in delivery.staged),
        )

    def _prove(self, version: WeightVersion) -> tuple[float, ...]:
        proving = self._engines.begin("probe", self._probe_tokens)
        reference = self._trainer.probe(self._probe_tokens, timeout_s=self._timeout_s)
        found = self._engines.wait(proving, "probe", timeout_s=self._timeout_s)
        gaps = tuple(_gap(logprobs, reference) for logprobs in found)
        bad = [engine for engine, gap in enumerate(gaps) if not gap <= self._max_probe_gap]
        if bad:
            fault = (
                f"weight version {version}: the probe's log-probabilities differ from the trainer's by "
                f"{max(gaps[engine] for engine in bad):.3g} nats on average, {self._max_probe_gap} are allowed "
                "(engine.probe_max_logprob_gap)"
            )
            fencing = [self._engines.actors[engine].fence.remote(fault) for engine in bad]
            self._engines.wait(fencing, "fence", timeout_s=self._timeout_s)
            raise RuntimeError(f"engine(s) {bad} are fenced: {fault}")
        return gaps


def _gap(found: object, reference: ProbeResult) -> float:
    """Mean absolute difference in nats; NaN if the engine's are not finite."""
    return float(np.abs(np.asarray(found, dtype=np.float64) - reference.logprobs).mean())
