"""Sequences one publish: stage at the trainer, apply in every engine, prove, resume.

The controller's side; no torch, no bytes. The order is decision 3's: every trainer rank stages its
buckets first; an engine looks at all of them before it pauses; weights are applied; the probe compares
each engine's log-probabilities with the trainer's own under the same codes; only then the engine serves
the new version. Whatever goes wrong is raised with the engine or rank named, after the engines that
could not prove themselves are fenced: no token is sampled from weights that nobody vouches for.
"""

import time
from collections.abc import Sequence

import numpy as np
import ray

from megatron_rl.probe_prompt import probe_tokens
from megatron_rl.results import ProbeResult, StagedWeights
from megatron_rl.trainer_group import TrainerGroup
from megatron_rl.weights.publish_report import PublishReport
from megatron_rl.weights.reshard import ReshardPlan
from rollout.types import WeightVersion


class Publisher:
    """Publishes the trainer's weights to all engines of a run through shared memory."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: Sequence[ray.actor.ActorHandle],
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
        self._engines = tuple(engines)
        self._plan = plan
        self._run_id = run_id
        self._probe_tokens = probe_tokens(vocab_size, probe_length)
        self._max_probe_gap = max_probe_gap
        self._timeout_s = timeout_s

    def publish(self, policy_version: int) -> PublishReport:
        """Bring every engine to `policy_version`; returns when all of them serve it.

        Raises:
            RuntimeError: a rank or an engine failed, was late, or did not pass the probe.
        """
        version = WeightVersion(policy_version)
        started = time.perf_counter()
        staged = self._trainer.stage(version, timeout_s=self._timeout_s)
        staged_at = time.perf_counter()
        try:
            self._apply(version, staged)
        finally:
            self._trainer.unstage()
        applied_at = time.perf_counter()
        gaps = self._prove(version)
        self._on_engines("resume")
        return PublishReport(
            weight_version=version,
            wire_bytes=sum(part.num_bytes for part in staged),
            stage_s=staged_at - started,
            apply_s=applied_at - staged_at,
            probe_s=time.perf_counter() - applied_at,
            probe_gaps=gaps,
        )

    def _apply(self, version: WeightVersion, staged: Sequence[StagedWeights]) -> None:
        manifest = self._plan.manifest(self._run_id, version)
        segments = {part.rank: part.path for part in staged if part.path}
        self._on_engines("update", manifest, segments)

    def _prove(self, version: WeightVersion) -> tuple[float, ...]:
        reference = self._trainer.probe(self._probe_tokens, timeout_s=self._timeout_s)
        gaps = tuple(_gap(found, reference) for found in self._on_engines("probe", self._probe_tokens))
        bad = [engine for engine, gap in enumerate(gaps) if not gap <= self._max_probe_gap]
        if bad:
            fault = (
                f"weight version {version}: the probe's log-probabilities differ from the trainer's by "
                f"{max(gaps[engine] for engine in bad):.3g} nats on average, {self._max_probe_gap} are allowed "
                "(engine.probe_max_logprob_gap)"
            )
            ray.get([self._engines[engine].fence.remote(fault) for engine in bad])
            raise RuntimeError(f"engine(s) {bad} are fenced: {fault}")
        return gaps

    def _on_engines(self, method: str, *args: object) -> list[object]:
        """Call `method` on every engine at once; an error or a late engine is raised by its number."""
        refs = [getattr(engine, method).remote(*args) for engine in self._engines]
        done, late = ray.wait(refs, num_returns=len(refs), timeout=self._timeout_s, fetch_local=False)
        for ref in done:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                raise RuntimeError(f"engine {refs.index(ref)}: {method} failed: {error}") from error
        if late:
            numbers = [refs.index(ref) for ref in late]
            raise RuntimeError(f"engine(s) {numbers} had not finished `{method}` after {self._timeout_s:.0f} s")
        return list(ray.get(refs))


def _gap(found: object, reference: ProbeResult) -> float:
    """Mean absolute difference in nats; NaN if the engine's are not finite."""
    return float(np.abs(np.asarray(found, dtype=np.float64) - reference.logprobs).mean())
