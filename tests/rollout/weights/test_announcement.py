"""Announced publishes: a receiver makes the whole manifest of what it holds, and refuses a plan that it does not."""

from dataclasses import replace

import pytest

from rollout.types import WeightVersion
from rollout.weights.announcement import Announcement, HeldPlan, SentPlan
from rollout.weights.manifest import Bucket, TensorSpec, WeightManifest

TENSOR = TensorSpec(name="w", shape=(2, 2), dtype="bfloat16")
MANIFEST = WeightManifest(
    run_id="run",
    weight_version=WeightVersion(0),
    format="bf16",
    tensors=(TENSOR,),
    buckets=(Bucket(index=0, source_rank=0, num_bytes=64, pieces=()),),
)
OTHER_PLANS = [
    {"run_id": "another"},
    {"format": "int8"},
    {"tensors": (replace(TENSOR, shape=(4, 2)),)},
    {"buckets": (replace(MANIFEST.buckets[0], engine_ranks=(1,)),)},
]


@pytest.mark.parametrize("change", [{}, *OTHER_PLANS], ids=lambda change: next(iter(change), "version"))
def test_a_publish_has_the_identity_of_the_last_one_if_only_its_version_differs(change):
    sent = SentPlan()
    first = sent.announce(MANIFEST)
    sent.given((0, 1))
    again = replace(MANIFEST, weight_version=WeightVersion(7), **change)
    second = sent.announce(again)
    assert second.weight_version == 7
    assert (second.plan == first.plan) is (not change)
    assert sent.lacking((0, 1, 2)) == ((0, 1, 2) if change else (2,))
    # a plan that was left gets a new identity
    assert (sent.announce(MANIFEST).plan == first.plan) is (not change)


def test_a_receiver_makes_the_manifest_of_a_version_from_the_one_that_it_holds():
    sent, held = SentPlan(), HeldPlan()
    held.keep(sent.announce(MANIFEST), MANIFEST)
    later = replace(MANIFEST, weight_version=WeightVersion(3))
    assert held.manifest(sent.announce(later)) == later


def test_a_receiver_refuses_a_plan_that_it_does_not_hold():
    first, second = SentPlan().announce(MANIFEST), SentPlan().announce(MANIFEST)
    held = HeldPlan()
    with pytest.raises(RuntimeError, match=f"weight version 0 follows plan {first.plan}, but no plan is held"):
        held.manifest(first)
    held.keep(first, MANIFEST)
    held.keep(second, MANIFEST)
    with pytest.raises(RuntimeError, match=f"follows plan {first.plan}, but plan {second.plan} is held"):
        held.manifest(Announcement(plan=first.plan, weight_version=WeightVersion(9)))


def test_a_receiver_that_is_forgotten_needs_the_whole_manifest():
    sent = SentPlan()
    sent.announce(MANIFEST)
    sent.given((0, 1))
    sent.forget(1)
    assert sent.lacking((0, 1)) == (1,)
