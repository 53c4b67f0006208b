"""The record of publishing: its comparisons, and a real transfer."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.harness.record import Row
from benchmarks.publish.__main__ import CHANGING
from benchmarks.publish.cases import Case
from benchmarks.publish.judged import byte_figures, goals
from benchmarks.publish.on_device import too_large
from benchmarks.publish.overlapped_peer import SIZES, OverlappedPeer, buckets
from benchmarks.publish.parts import asleep, gather_s, quantise_s, transfer_s, write_model
from benchmarks.publish.peer import Peer, peer_row
from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.weights.reshard_plan import ReshardPlan, plan_reshard
from rollout.weights.format import WeightFormat
from rollout.weights.manifest import Required
from tests.megatron_rl.weights.test_reshard_plan import INT8, SPEC, shards


def test_shapes_that_exceed_the_device_beside_their_engine_are_left_out():
    h100, h200 = 85_000_000_000, 150_000_000_000
    assert [too_large(name, "int8", h100) for name in ("7B", "14B", "32B")] == [False, False, True]
    assert [too_large("32B", format, h200) for format in ("int8", "fp8_block", "bf16")] == [False, False, False]


def rows(*, deliver_s: float = 1.0, transfer: float = 0.5, share: float = 1.0, proof: float = 0.14) -> list[Row]:
    case = {"trainer": "TP2", "engines": "1 x TP2", "transport": "gloo"}
    ours = {"kind": "publish", "transfer_s": transfer, "plain_s": 0.4}
    ours |= {"rank_bytes_over_own_shard": share, "proof_share": 0.0, "proof_share_high": proof}
    for role, peak in (("trainer", 90), ("engine", 120)):
        ours |= {f"peak_extra_bytes/{role}": peak, f"peak_bound_bytes/{role}": 100}
    return [
        {**case, **ours, "format": "int8"},
        {**case, **ours, "format": "bf16", "rank_bytes_over_own_shard": 9.0},
        *(
            {
                **case,
                "kind": kind,
                "format": format,
                "ours_over_peer_high": factor * deliver_s / 2,
                "proven_over_peer_high": factor * deliver_s / 1.6,
            }
            for kind in ("peer", "overlapped peer")
            for format, factor in (("int8", 1.0), ("bf16", 14.0))
        ),
    ]


def met(found: list[Row]) -> dict[str, tuple[float, bool]]:
    return {goal.name: (goal.value, goal.met) for goal in goals(found)}


def test_8_bit_rows_are_compared_with_the_peer_the_shard_and_a_plain_copy() -> None:
    assert met(rows()) == {
        "proof over a publish without it": (0.14, True),
        "bytes that a rank received over its own 8-bit shard": (1.0, True),
        "seconds without the proof over the peer's": (0.5, True),
        "seconds with the proof over the peer's": (0.625, True),
        "seconds with the proof over the overlapped peer's": (0.625, True),
        "rate over a plain copy's": (0.8, True),
        "trainer: peak extra over its bound": (0.9, True),
        "engine: peak extra over its bound": (1.2, False),
    }
    found = met(rows(deliver_s=1.7, transfer=1.0, share=1.5, proof=0.16))
    assert [ok for _, ok in found.values()] == [False, False, False, False, False, False, True, False]


def planned_bytes(plan: ReshardPlan, required: list[Required]) -> int:
    """Bytes that the plan sends to the rank that gets most."""
    return max(
        sum(bucket.num_bytes for bucket in plan.buckets if bucket.required_by(rank)) for rank in range(len(required))
    )


def test_the_plan_sends_a_rank_its_own_shards_and_a_trailer_for_each_bucket() -> None:
    required = shards(SPEC, INT8, 2)
    plan = plan_reshard(
        SPEC, ParallelConfig(tensor=2), format=INT8, bucket_bytes=1 << 20, uses_te_layer_names=False, required=required
    )
    sent = planned_bytes(plan, required)
    found = byte_figures(plan, required, [{"publish/received_bytes_max": float(sent)}])
    assert found["own_shard_bytes"] < found["rank_bytes"] == sent < 1.5 * found["own_shard_bytes"]
    # rows of 32 to 64 inputs with a scale of four bytes each
    assert 0.5 + 2 / 64 < found["bytes_over_bf16"] < 0.5 + 2 / 32 < found["received_over_bf16"] < 1


@pytest.mark.slow
def test_a_transfer_completes_with_and_without_checksums(tmp_path) -> None:
    model = write_model(tmp_path / "model", quick=True)
    plan = plan_reshard(
        read_model_spec(model),
        ParallelConfig(),
        format=WeightFormat(name="int8"),
        bucket_bytes=8 << 20,
        uses_te_layer_names=False,
    )
    for transport, plain in (("gloo", False), ("shm", True)):
        assert transfer_s(plan, num_engines=1, num_ranks=1, transport=transport, plain=plain) > 0
    assert quantise_s(model, "int8", num_engines=1, num_ranks=2) > 0
    assert quantise_s(model, "bf16", num_engines=1, num_ranks=1) == 0


@pytest.mark.slow
@pytest.mark.parametrize("by_stage", [False, True])
def test_gathering_transfers_the_shards_that_a_rank_lacks(tmp_path, by_stage) -> None:
    assert gather_s(write_model(tmp_path / "model", quick=True), by_stage=by_stage) > 0


def test_the_peers_parts_are_summed_for_each_publish() -> None:
    case = {"trainer": "PP2", "engines": "1 x TP2", "format": "int8", "transport": "gloo"}
    found = [
        {"bare_s": ours, "total_s": 2 * ours, "gather_s": gather_s, "send_s": 2.0, "quantise_s": 4.0, "more": 9.0}
        for ours, gather_s in ((3.0, 1.0), (15.0, 1.0), (4.0, 10.0))
    ]
    row = peer_row({**case, "kind": "publish"}, found, apply_s=8.0)
    ratios = [3 / 15, 15 / 15, 4 / 24]
    mean, half = statistics.fmean(ratios), 4.30 * statistics.stdev(ratios) / 3**0.5
    expected = {"gather_s": 1.0, "send_s": 2.0, "quantise_s": 4.0, "apply_s": 8.0, "deliver_s": 15.0}
    for name, factor in (("ours_over_peer", 1), ("proven_over_peer", 2)):
        expected |= {name: factor * mean, f"{name}_low": factor * (mean - half), f"{name}_high": factor * (mean + half)}
    assert {name: row.pop(name) for name in ("kind", *case)} == {**case, "kind": "peer"}
    assert row == pytest.approx(expected)


def test_the_overlapped_peers_buckets_hold_every_tensor_once_in_order() -> None:
    sizes = (3, 3, 9, 1, 1, 1, 1, 4)
    weights = {str(number): torch.zeros(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    assert list(buckets(weights, 4)) == [["0"], ["1"], ["2"], ["3", "4", "5", "6"], ["7"]]


@pytest.mark.slow
@pytest.mark.bench
@pytest.mark.parametrize("engines", ["2 x TP1", "1 x TP2"])
def test_the_overlapped_peer_finishes_at_the_best_of_its_bucket_sizes(tmp_path, engines) -> None:
    case = Case(trainer="TP2", engines=engines, format="int8")
    peer = OverlappedPeer(write_model(tmp_path / "model", quick=True), case)
    assert peer.measure() > 0 and peer.bucket_bytes in SIZES


def test_the_peer_is_measured_twice_for_each_case_and_the_second_time_counts(tmp_path, monkeypatch) -> None:
    measured = []
    seconds = {"gather_s": iter((9.0, 1.0)), "transfer_s": iter((9.0, 2.0)), "quantise_s": iter((9.0, 4.0))}

    def measure(name: str, _: object, *args: object, **options: object) -> float:
        measured.append((name, *args, *options.values()))
        return next(seconds[name])

    for name in seconds:
        monkeypatch.setattr(f"benchmarks.publish.peer.{name}", partial(measure, name))
    peer = Peer(write_model(tmp_path / "model", quick=True))
    case = Case(trainer="PP2", engines="1 x TP2", format="int8")
    assert peer.measure(case, "gloo") == {"gather_s": 1.0, "send_s": 2.0, "quantise_s": 4.0}
    asked = [("gather_s", True), ("transfer_s", 1, 2, "gloo", False), ("quantise_s", "int8", 1, 2)]
    assert measured == [one for one in asked for _ in range(2)]


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, at most half a minute."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stopped_process_uses_no_cpu_time() -> None:
    script = "import setproctitle\nsetproctitle.setproctitle('sleeper')\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script]) as sleeper:
        try:
            process = psutil.Process(sleeper.pid)
            until(lambda: process.cmdline()[:1] == ["sleeper"])  # empty between fork and exec
            with asleep({"who": "sleep"}):
                until(lambda: process.status() == psutil.STATUS_STOPPED)
                before = sum(process.cpu_times())
                time.sleep(0.5)
                assert sum(process.cpu_times()) - before < 0.1  # ticks from before the stop may be counted late
            until(lambda: process.status() != psutil.STATUS_STOPPED)
        finally:
            sleeper.kill()


def test_a_delta_is_compared_with_a_whole_publish() -> None:
    delta = {**rows()[0], "kind": "delta", "bytes_over_whole": 0.3}
    assert {goal.name: goal.met for goal in goals([*rows(), delta])}["bytes of a delta over those of all"] is False


@pytest.mark.slow
def test_every_20th_weight_of_a_matrix_changes_its_sign_between_publishes() -> None:
    """Run in a new process, because importing the module changes trainer ranks."""
    script = """
import importlib
from types import SimpleNamespace
import torch
from megatron_rl.weights.packer import WeightPacker
seen = []
WeightPacker.refresh_scales = lambda packer: seen.append(packer)
module = importlib.import_module("CHANGING".rpartition(".")[0])
matrix, vector = torch.ones(4, 30), torch.ones(30)
packer = SimpleNamespace(_parameters={"a": matrix, "b": vector})
WeightPacker.refresh_scales(packer)
assert (matrix.view(-1) < 0).nonzero().view(-1).tolist() == [0, 20, 40, 60, 80, 100] and vector.eq(1).all()
WeightPacker.refresh_scales(packer)
assert matrix.eq(1).all() and seen == [packer, packer]
""".replace("CHANGING", CHANGING)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def test_rows_without_8_bits_have_no_goals() -> None:
    assert goals([row for row in rows() if row["format"] == "bf16"]) == []


@pytest.mark.parametrize("name", ["int8", "fp8_block"])
def test_the_model_can_be_published_in_a_format(tmp_path, name) -> None:
    spec = read_model_spec(write_model(tmp_path, quick=True))
    required = shards(spec, WeightFormat(name=name), 2)
    plan = plan_reshard(
        spec,
        ParallelConfig(pipeline=2),
        format=WeightFormat(name=name),
        bucket_bytes=16 << 20,
        uses_te_layer_names=False,
        required=required,
    )
    received = [{"publish/received_bytes_max": float(planned_bytes(plan, required))}]
    assert byte_figures(plan, required, received)["rank_bytes_over_own_shard"] < 1.02
