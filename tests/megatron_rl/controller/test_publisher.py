"""The protocol of a publish: its order, and the fence of an engine that fails verification."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.controller.delivery import GRACE_S, DeliveryReport, StreamingDelivery
from megatron_rl.controller.publisher import Publisher, spread
from megatron_rl.model.spec import Experts, ModelSpec
from megatron_rl.trainer.messages import ProbeResult, StagedWeights, TrainerProof
from megatron_rl.weights.quantization_stats import QuantizationStats
from megatron_rl.weights.reshard_plan import plan_reshard
from rollout.engine.state import EngineProof, UpdateTimes
from rollout.failures import DeadlineError, Place, ProcessLostError
from rollout.transports.base import StoreAddress
from rollout.weights.fingerprint_sums import NUM_GROUPS, difference
from rollout.weights.format import WeightFormat
from tests.megatron_rl.weights.test_reshard_plan import INT8, SPEC, ParallelConfig

CODES = QuantizationStats(signal=100.0, noise=1.0, num_codes=8, num_saturated=2)
SUMS = np.ones((2, 1, NUM_GROUPS))
STAGED = StagedWeights(
    rank=0, path="", num_bytes=5, scales_s=0.1, pack_s=0.2, send_s=0.3, sums_s=0.1, fault="", codes={0: CODES}
)
TIMES = UpdateTimes(
    arrive_s=0.0, pause_s=0.01, apply_s=0.5, num_in_flight=2, num_recomputed_tokens=30, received_bytes=4
)
REFERENCE = np.linspace(-3, -1, 7, dtype=np.float32)


class Engines:
    """Stand-in for an `EngineGroup`: records every call and answers with probes and sums."""

    def __init__(self, log, probes, sums):
        self.log, self.probes, self.sums = log, probes, sums
        self.check = lambda manifest, *, timeout_s: log.append("check")
        self.drain = lambda *, timeout_s: log.append("drain")
        self.resume = lambda *, timeout_s: log.append("resume")

    def prove(self, expected, lenience, token_ids, *, timeout_s):
        self.log.append(f"engines prove, {len(token_ids)} tokens")
        gaps = [difference(sums, expected, leniency=lenience.of) for sums in self.sums]
        return {
            number: EngineProof(weight_gap=gap, where=where, logprobs=probe)
            for number, ((gap, where), probe) in enumerate(zip(gaps, self.probes, strict=True))
        }

    def fence(self, faults, *, timeout_s):
        self.log.extend(f"fence {number}: {fault}" for number, fault in faults.items())


class Trainer:
    def __init__(self, log, tensor="w"):
        self.log, self.tensor, self.logprobs = log, tensor, REFERENCE

    def begin_proof(self, token_ids):
        self.log.append(f"trainer begins its proof, {len(token_ids)} tokens")

    def finish_proof(self, *, timeout_s):
        self.log.append("trainer ends its proof")
        return TrainerProof(sums={self.tensor: SUMS}, probe=ProbeResult(logprobs=self.logprobs))


class Delivery:
    def __init__(self, log):
        self.log = log

    def deliver(self, manifest, meanwhile):
        manifest.check()
        self.log.append(f"deliver {manifest.weight_version} of {manifest.run_id}")
        meanwhile()
        times = [replace(TIMES, apply_s=seconds) for seconds in (0.5, 0.75)]
        return DeliveryReport(staged=(STAGED,), updates=tuple(times))


def publisher(log, probes, spec: ModelSpec = SPEC, *, sums=None, format=INT8, tensor="w", **more) -> Publisher:
    return Publisher(
        Trainer(log, tensor),
        Engines(log, probes, sums or [{"w": SUMS}] * len(probes)),
        Delivery(log),
        plan=plan_reshard(
            spec, ParallelConfig(tensor=2), format=format, bucket_bytes=1 << 20, uses_te_layer_names=False
        ),
        run_id="run",
        vocab_size=spec.vocab_size,
        probe_length=8,
        max_probe_gap=0.1,
        timeout_s=1.0,
        **more,
    )


def test_engines_accept_the_manifest_before_any_byte_is_sent_and_serve_only_after_the_probe():
    log = []
    parts = {"begin_part": lambda part: log.append(f"part: {part}")}
    report = publisher(log, [REFERENCE, REFERENCE + 0.05], **parts).publish(3)
    assert log == [
        "part: check",
        "check",
        "part: send",
        "deliver 3 of run",
        "trainer begins its proof, 8 tokens",
        "part: prove",
        "trainer ends its proof",
        "engines prove, 8 tokens",
        "resume",
    ]
    assert report.probe_gaps == pytest.approx((0.0, 0.05), abs=1e-6)
    assert report.metrics()["publish/probe_gap_max"] == pytest.approx(0.05, abs=1e-6)


def test_requests_in_flight_are_reported_and_drained_before_the_transfer_if_configured():
    log = []
    report = publisher(log, [REFERENCE, REFERENCE], drain_timeout_s=9.0).publish(3)
    assert log[:3] == ["check", "drain", "deliver 3 of run"]
    assert (report.num_in_flight, report.num_recomputed_tokens) == (4, 60)
    assert report.metrics()["publish/recomputed_tokens"] == 60


def test_an_engine_that_takes_no_bucket_is_reported_as_its_own_failure_and_the_trainer_lives_on():
    engines = SimpleNamespace(
        alive=(0,),
        begin_update=lambda manifest, addresses, *, with_sums: "update",
        wait=lambda call, *, timeout_s: {0: TIMES},
    )
    staged, limits = [STAGED, replace(STAGED, fault="gone")], []

    def stage(version, *, timeout_s, with_sums):
        limits.append(timeout_s)
        return staged

    trainer = SimpleNamespace(stage=stage)
    delivery = StreamingDelivery(trainer, engines, source_ranks=(0, 1), timeout_s=1)
    manifest = SimpleNamespace(weight_version=3)
    with pytest.raises(DeadlineError, match="gone") as caught:
        delivery.deliver(manifest, lambda: None)
    assert caught.value.place.role == "engine"
    assert limits == [1 + GRACE_S], "a rank names a late engine within its own limit, before it counts as hung itself"
    trainer.stage = lambda version, *, timeout_s, with_sums: [STAGED]
    assert delivery.deliver(manifest, lambda: None).updates == (TIMES,)


@pytest.mark.parametrize("dies", [False, True])
def test_an_engine_that_never_joins_is_reported_as_its_own_failure_and_the_trainer_lives_on(dies):
    """Engine 0 is given up, so engine 1 is the first of the chain."""
    death, attached = ProcessLostError("engine 1 ended", Place(role="engine", ranks=(1,))), []
    sources = {}

    def wait(call, *, timeout_s):
        if dies:
            raise death

    def attach_group(engine, channel):
        attached.append((engine, channel.source_ranks))
        return ["", "trainer rank 1 waited 1 s for engine rank 0 to join the channel"]

    def begin_init_transport(channels):
        sources.update({engine: channel.named(0) for engine, channel in channels.items()})
        return "join"

    engines = SimpleNamespace(
        num_ranks=1,
        node_ids=lambda *, timeout_s: {1: "a", 2: "a"},
        begin_init_transport=begin_init_transport,
        wait=wait,
    )
    store = StoreAddress(host="127.0.0.1", port=1, secret=b"")
    trainer = SimpleNamespace(attach_group=attach_group, open_stores=lambda first, count: [store] * count)
    delivery = StreamingDelivery(trainer, engines, source_ranks=(0, 1), timeout_s=1)
    with pytest.raises(ProcessLostError if dies else DeadlineError, match=r"engine 1 ended|rank 1 waited") as caught:
        delivery.connect()
    assert caught.value.place == Place(role="engine", ranks=(1,))
    assert attached == [(1, (0, 1))]
    assert sources == {1: "trainer rank 0", 2: "engine 1's rank 0"}


MIXTURE = replace(SPEC, experts=Experts(count=4, per_token=2, ffn_size=48, normalised=True))


@pytest.mark.parametrize(
    ("tensor", "difference", "is_served"),
    [
        ("model.layers.1.mlp.experts.2.down_proj.weight", 0.1, True),
        ("model.layers.1.mlp.experts.2.down_proj.weight", 0.6, False),
        ("model.layers.0.mlp.experts.2.down_proj.weight", 0.1, False),
        ("model.layers.1.self_attn.o_proj.weight", 0.1, False),
    ],
    ids=["an expert in 8 bits", "another expert", "an expert that stays BF16", "any other matrix"],
)
def test_only_experts_in_8_bits_may_differ_by_the_rounding_of_activations(tensor, difference, is_served):
    format = WeightFormat(name="int8", bf16_first_layers=1)
    sums = [{tensor: SUMS + np.array([difference, 0])[:, None, None]}]
    one = publisher([], [REFERENCE], MIXTURE, sums=sums, format=format, tensor=tensor)
    if is_served:
        one.publish(3)
    else:
        with pytest.raises(RuntimeError, match=r"differs from the trainer's by \d+(\.\d+)? times the bound"):
            one.publish(3)


@pytest.mark.parametrize("num_updated", [0, 1])
def test_a_publish_that_reaches_no_engine_names_the_lost_engine_and_leaves_the_version(num_updated):
    """The only engine dies while the trainer stages, or after it has applied the weights; nobody else is called."""
    log = []
    one = publisher(log, [])
    one._engines.lost = (0,)
    deliver = one._delivery.deliver
    one._delivery.deliver = lambda *sent: replace(deliver(*sent), updates=(TIMES,) * num_updated)
    with pytest.raises(ProcessLostError, match=r"version 3 has reached no engine; engine\(s\) \[0\] are lost") as error:
        one.publish(3)
    assert error.value.place == Place(role="engine", ranks=(0,))
    assert one.version == -1 and "resume" not in log


def test_engines_probe_only_after_the_trainer_offloaded():
    log = []
    publisher(log, [REFERENCE, REFERENCE], make_room=lambda: log.append("make room")).publish(3)
    assert log[-4:] == ["trainer ends its proof", "make room", "engines prove, 8 tokens", "resume"]


def test_the_bound_of_the_probe_grows_with_the_spread_because_rounding_does():
    """Confident models have log-probabilities far apart: a healthy BF16 engine then differs by more than 0.1 nats."""
    confident = 4 * REFERENCE
    assert spread(confident) == pytest.approx(np.std(confident)) == pytest.approx(8 / 3)
    assert spread(REFERENCE) == 1.0
    served = publisher([], [confident + 0.25])
    served._trainer.logprobs = confident
    assert served.publish(3).probe_gaps == pytest.approx((0.25,))
    refused = publisher([], [confident + 0.28])
    refused._trainer.logprobs = confident
    with pytest.raises(RuntimeError, match=r"0\.28 nats on average; the bound is 0\.267"):
        refused.publish(3)


@pytest.mark.parametrize("wrong", [REFERENCE + 0.2, np.full(7, np.nan, dtype=np.float32)], ids=["far off", "nan"])
def test_an_engine_that_fails_the_probe_is_fenced_and_no_engine_serves(wrong):
    log = []
    with pytest.raises(RuntimeError, match=r"engine\(s\) \[1\] are fenced: weight version 3"):
        publisher(log, [REFERENCE, wrong]).publish(3)
    assert [entry.split(":")[0] for entry in log if ": weight version 3" in entry] == ["fence 1"]
    assert "resume" not in log


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        ({"w": SUMS + np.eye(NUM_GROUPS)[5] / 2}, "w, 6. of 64 groups of rows differs"),
        ({"w": SUMS * np.nan}, "w, 1. of 64"),
        ({}, "w is known to one side only"),
    ],
    ids=["a group", "nan", "missing"],
)
def test_an_engine_with_another_fingerprint_is_fenced_naming_the_tensor(sums, said):
    log = []
    with pytest.raises(RuntimeError, match=rf"engine\(s\) \[1\] are fenced: weight version 3: {said}"):
        publisher(log, [REFERENCE, REFERENCE], sums=[{"w": SUMS * 1.001}, sums]).publish(3)
    assert "resume" not in log
