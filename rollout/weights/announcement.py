"""Announces a publish without its manifest, to receivers that hold the manifest of an earlier publish.

All publishes of a trainer follow one plan, so their manifests differ in the weight version only, and a manifest of a
large model has many megabytes. So a receiver gets a whole manifest once, with the plan's identity, and keeps it. A
later announcement has the identity and the version.

    SentPlan       the sender's side: the plan, and who holds it
    HeldPlan       the receiver's side

Invariant: an identity stands for one plan only, and a receiver refuses one that it does not hold. So a publish never
follows another plan than its sender's.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from rollout.types import WeightVersion
from rollout.weights.manifest import WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One publish, told to a receiver that holds the plan."""

    plan: str
    """Identity of everything in the manifest but the version."""
    weight_version: WeightVersion


@dataclass(slots=True)
class SentPlan:
    """The plan of a sender's publishes; all methods but `lacking` mutate."""

    _manifest: WeightManifest | None = field(default=None, init=False)
    _plan: str = field(default="", init=False)
    _holders: set[int] = field(default_factory=set, init=False)

    def announce(self, manifest: WeightManifest) -> Announcement:
        """The announcement of a publish. A plan that differs from the last one has no holders."""
        if self._manifest is None or not manifest.follows_plan_of(self._manifest):
            self._manifest, self._plan, self._holders = manifest, uuid4().hex, set()
        return Announcement(plan=self._plan, weight_version=manifest.weight_version)

    def lacking(self, receivers: Iterable[int]) -> tuple[int, ...]:
        """Those of the receivers that need the whole manifest."""
        return tuple(number for number in receivers if number not in self._holders)

    def given(self, receivers: Collection[int]) -> None:
        """These receivers have the whole manifest now."""
        self._holders.update(receivers)

    def forget(self, receiver: int) -> None:
        """A new process has taken the receiver's number, or nobody knows what it holds."""
        self._holders.discard(receiver)


@dataclass(slots=True)
class HeldPlan:
    """The plan that a receiver has got; `keep` mutates."""

    _manifest: WeightManifest | None = field(default=None, init=False)
    _plan: str = field(default="", init=False)

    def keep(self, announced: Announcement, manifest: WeightManifest) -> None:
        """Keep the manifest that came with an announcement, in place of the last one."""
        self._manifest, self._plan = manifest, announced.plan

    def manifest(self, announced: Announcement) -> WeightManifest:
        """The manifest of an announced publish.

        Raises:
            RuntimeError: the receiver holds another plan, or none.
        """
        if self._manifest is None or self._plan != announced.plan:
            raise RuntimeError(
                f"weight version {announced.weight_version} follows plan {announced.plan}, but "
                + (f"plan {self._plan} is held" if self._plan else "no plan is held")
                + "; the whole manifest must come first"
            )
        return self._manifest.of_version(announced.weight_version)
