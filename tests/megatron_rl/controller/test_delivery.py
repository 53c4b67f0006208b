"""When staged buckets are released, and that nobody serves what a late engine loads afterwards."""

from types import SimpleNamespace

import pytest

from megatron_rl.controller.delivery import ColocatedDelivery, ShmDelivery, WeightDelivery
from rollout.failures import DeadlineError, Place
from tests.megatron_rl.controller.test_publisher import REFERENCE, STAGED, TIMES, publisher

LATE = DeadlineError("engine(s) [1] had not finished `update` after 1 s", Place(role="engine", ranks=(1,)))


def delivery(kind: str, log: list[str], ends: list[object]) -> WeightDelivery:
    """A delivery to two engines; each update of theirs ends as the next of `ends` says."""

    def wait(call: str, *, timeout_s: float) -> dict[int, object]:
        end = ends.pop(0)
        if isinstance(end, Exception):
            log.append("engine 1 is late")
            raise end
        log.append("both engines have applied")
        return {0: end, 1: end}

    def stage(version: int, *, timeout_s: float, with_sums: bool) -> list[object]:
        log.append(f"stage {version}")
        return [STAGED]

    def begin_update(manifest, addresses, *, with_sums: bool) -> str:
        log.append(f"update {sorted(addresses)}")
        return "update"

    engines = SimpleNamespace(alive=(0, 1), begin_update=begin_update, wait=wait)
    trainer = SimpleNamespace(stage=stage, unstage=lambda: log.append("release"))
    if kind == "shm":
        return ShmDelivery(trainer, engines, timeout_s=1)
    return ColocatedDelivery(trainer, engines, homes=[[0], [0]], memory="cuda", timeout_s=1)


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc"])
def test_buckets_are_released_after_all_engines_have_applied_them(kind: str) -> None:
    log: list[str] = []
    delivery(kind, log, [TIMES]).deliver(SimpleNamespace(weight_version=3), lambda: log.append("meanwhile"))
    assert log == ["stage 3", "update [0, 1]", "meanwhile", "both engines have applied", "release"]


@pytest.mark.parametrize("kind", ["shm", "cuda_ipc"])
def test_what_a_late_engine_reads_after_the_release_is_neither_proven_nor_served_but_sent_again(kind: str) -> None:
    log: list[str] = []
    one = publisher(log, [REFERENCE, REFERENCE])
    one._delivery = delivery(kind, log, [LATE, TIMES])
    with pytest.raises(DeadlineError, match=r"engine\(s\) \[1\] had not finished `update`"):
        one.publish(3)
    assert log[-2:] == ["engine 1 is late", "release"]
    assert one.version == -1
    log.clear()
    one.publish(3)
    assert [line for line in log if not line.startswith("trainer")] == [
        *("check", "stage 3", "update [0, 1]", "both engines have applied", "release"),
        *("engines prove, 8 tokens", "resume"),
    ]
