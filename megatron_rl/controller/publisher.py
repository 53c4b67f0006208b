"""The controller's side of a publish: check, deliver, prove, resume.

The order is that of decision 3:

1. Every engine accepts the manifest before a byte is sent.
2. The delivery sends the buckets. Engines verify before they apply. Both sides sum the weights as they pack and load.
3. The trainer computes what engines must find (`TrainerProof`) while engines still apply.
4. All engines at once compare their sums over all weights with the trainer's, and log-probabilities of the probe.
5. Engines serve the new version.

Errors name the engine or rank. An engine that fails step 4 stays fenced: no token is sampled from unverified weights.
This process holds neither torch nor weights.
"""

import time
from collections.abc import Callable, Mapping
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt

from megatron_rl.controller.delivery import WeightDelivery
from megatron_rl.controller.publish_refusal import PublishRefusedError
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.trainer.group import TrainerGroup
from megatron_rl.trainer.messages import TrainerProof
from megatron_rl.weights.quantization_stats import sum_stats
from megatron_rl.weights.reshard_plan import ReshardPlan
from rollout.engine.state import EngineProof
from rollout.failures import CallError, Place, ProcessLostError
from rollout.pool.engine_group import EngineGroup
from rollout.types import WeightVersion
from rollout.weights.fingerprint_sums import Lenience


def probe_tokens(vocab_size: int, num_tokens: int) -> list[int]:
    """Token ids of the probe prompt: spread over the whole vocabulary and the same in every run."""
    return [(7919 * (index + 1)) % vocab_size for index in range(num_tokens)]


MAX_WEIGHT_GAP = 0.02
"""Bound of the difference of weight sums (`rollout.weights.fingerprint_sums.difference`); few wrong rows stay below it.

Rounding to BF16 changes a number by at most 2^-8 of it, and by about 0.0017 of it in the root mean square
(2^-8 / sqrt(6) for uniform mantissas). A difference is relative to the root of the summed squares of a group's rows.
So k roundings with independent errors give it a standard deviation of at most 0.0017 sqrt(k). Five deviations are 0.008
for a linear layer, which rounds its output once. They are 0.019 for a BF16 expert whose kernel rounds five times: gate,
up, activation, their product, and down. The number of roundings depends on the CPU's kernel, so tests of experts allow
the whole bound; tests of other layers allow a third of it."""

EXPERT_LENIENCY = 12.5
"""Factor of the bound for an expert in 8 bits, whose kernel quantises activations between its matrices. The right
expert differs by some hundredths, another expert by about 1."""


PublishPart = Literal["check", "send", "prove"]
"""What a publish does now: before a byte is sent, while engines receive and apply, and afterwards."""


class Publisher:
    """Publishes the trainer's weights to all engines of a run."""

    def __init__(
        self,
        trainer: TrainerGroup,
        engines: EngineGroup,
        delivery: WeightDelivery,
        *,
        plan: ReshardPlan,
        run_id: str,
        vocab_size: int,
        probe_length: int,
        max_probe_gap: float,
        timeout_s: float,
        drain_timeout_s: float | None = None,
        declines_delta: bool = False,
        make_room: Callable[[], None] | None = None,
        begin_part: Callable[[PublishPart], None] = lambda part: None,
    ) -> None:
        """Publish by `delivery`, which must be connected.

        `plan` equals the trainer's (`plan_reshard` of the same arguments). `max_probe_gap` is in nats per nat of
        `spread`. With
        `drain_timeout_s`, engines finish their responses before weights are sent, within that time. `make_room` is
        called after the trainer's last part in a publish, and engines forward only afterwards. `declines_delta` is
        reported. `begin_part` is called when a part begins.
        """
        self._trainer = trainer
        self._engines = engines
        self._delivery = delivery
        self._plan = plan
        layout = plan.format.layout
        expert_codes = {
            tensor.name for tensor in plan.tensors if tensor.is_stack and layout and tensor.dtype == layout.dtype
        }
        self._lenience = Lenience(stacks=frozenset(expert_codes), factor=EXPERT_LENIENCY)
        self._run_id = run_id
        self._probe_tokens = probe_tokens(vocab_size, probe_length)
        self._max_probe_gap = max_probe_gap
        self._timeout_s = timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._make_room = make_room
        self._declines_delta = declines_delta
        self._begin_part = begin_part
        self.version = -1
        """Version of the last publish that passed all checks; -1 before the first."""

    def publish(self, policy_version: int) -> PublishReport:
        """Publish `policy_version` to every engine; returns when all engines serve it.

        Raises:
            PublishRefusedError: an engine refused the weights, or its weight sums or its probe did not match.
            ProcessLostError: every engine was lost before its proof; `version` stays.
            RuntimeError: a rank or an engine failed, ended or was late.
        """
        try:
            return self._publish(policy_version)
        except CallError as error:
            if error.place.role != "engine":
                raise
            raise PublishRefusedError(f"weight version {policy_version}: {error}", error.place) from error

    def _publish(self, policy_version: int) -> PublishReport:
        version = WeightVersion(policy_version)
        manifest = self._plan.manifest(self._run_id, version)
        self._begin_part("check")
        self._engines.check(manifest, timeout_s=self._timeout_s)
        drained = time.perf_counter()
        if self._drain_timeout_s is not None:
            self._engines.drain(timeout_s=self._drain_timeout_s)
        self._begin_part("send")
        started = time.perf_counter()
        report = self._delivery.deliver(manifest, lambda: self._trainer.begin_proof(self._probe_tokens))
        delivered = time.perf_counter()
        self._begin_part("prove")
        expected = self._trainer.finish_proof(timeout_s=self._timeout_s)
        proofs = self._prove(version, expected)
        if not (report.updates and proofs):  # calls to no engine succeed
            lost = self._engines.lost
            raise ProcessLostError(
                f"weight version {version} has reached no engine; engine(s) {list(lost)} are lost",
                Place(role="engine", ranks=lost),
            )
        self._engines.resume(timeout_s=self._timeout_s)
        self.version = policy_version
        return PublishReport(
            weight_version=version,
            declines_delta=self._declines_delta,
            received_bytes=max(update.received_bytes for update in report.updates),
            wire_bytes=sum(part.num_bytes for part in report.staged),
            scales_s=max(part.scales_s for part in report.staged),
            pack_s=max(part.pack_s for part in report.staged),
            send_s=max(part.send_s for part in report.staged),
            drain_s=started - drained,
            num_in_flight=sum(update.num_in_flight for update in report.updates),
            num_recomputed_tokens=sum(update.num_recomputed_tokens for update in report.updates),
            pause_s=max(update.pause_s for update in report.updates),
            apply_s=max(update.apply_s for update in report.updates),
            deliver_s=delivered - started,
            probe_s=time.perf_counter() - delivered,
            sums_s=max(part.sums_s for part in report.staged),
            weight_gaps=tuple(proof.weight_gap for proof in proofs.values()),
            probe_gaps=tuple(_gap(proof, expected) for proof in proofs.values()),
            codes=sum_stats(part.codes for part in report.staged),
        )

    def _prove(self, version: WeightVersion, expected: TrainerProof) -> Mapping[int, EngineProof]:
        """Ask every engine for its proof; engines that differ from the trainer are fenced, and this raises."""
        if self._make_room is not None:
            self._make_room()
        proofs = self._engines.prove(expected.sums, self._lenience, self._probe_tokens, timeout_s=self._timeout_s)
        faults = {
            engine: f"weight version {version}: {proof.where} differs from the trainer's by "
            f"{proof.weight_gap / MAX_WEIGHT_GAP:.3g} times the bound"
            for engine, proof in proofs.items()
            if not proof.weight_gap <= MAX_WEIGHT_GAP
        }
        gaps = {engine: _gap(proof, expected) for engine, proof in proofs.items()}
        assert expected.probe is not None, "the last pipeline stage probes"
        bound = self._max_probe_gap * spread(expected.probe.logprobs)
        bad = {engine: gap for engine, gap in gaps.items() if not gap <= bound}
        if bad and not faults:
            fault = (
                f"weight version {version}: the probe's log-probabilities differ from the trainer's by "
                f"{max(bad.values()):.3g} nats on average; the bound is {bound:.3g} "
                "(engine.probe_max_logprob_gap, and engine.probe_max_kv_gap with FP8 keys and values)"
            )
            faults = dict.fromkeys(bad, fault)
        if faults:
            self._fence(faults)
        return proofs

    def _fence(self, faults: Mapping[int, str]) -> NoReturn:
        self._engines.fence(faults, timeout_s=self._timeout_s)
        raise PublishRefusedError(
            f"engine(s) {list(faults)} are fenced: {next(iter(faults.values()))}",
            Place(role="engine", ranks=tuple(faults)),
        )


def spread(logprobs: npt.NDArray[np.float32]) -> float:
    """Standard deviation of log-probabilities in nats, at least 1. Differences by rounding grow with it."""
    return max(1.0, float(logprobs.astype(np.float64).std()))


def _gap(proof: EngineProof, expected: TrainerProof) -> float:
    """Mean absolute difference in nats; not finite if a log-probability of the engine is not."""
    assert expected.probe is not None, "the last pipeline stage probes"
    return float(np.abs(np.asarray(proof.logprobs, dtype=np.float64) - expected.probe.logprobs).mean())
