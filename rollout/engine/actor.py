"""The engine as a Ray actor: the methods of `Engine` and `EngineWeights` for other processes.

Importing this module is cheap: the actor imports vLLM when it is constructed, in its own process.

Invariant: the actor only forwards calls. It returns a group as several objects, so that the controller fetches the
summary and keeps only references to the tokens, and a trainer rank fetches the parts that it trains on.
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Literal

import ray

from history.drafting.stats import DraftStats
from rollout.built_model import BuiltModel
from rollout.engine.history_sender import HistorySender
from rollout.engine.spec import EngineSpec
from rollout.engine.state import EngineProgress, EngineProof, EngineState, EngineStats, UpdateTimes
from rollout.group_parts import joined, most_parts, split
from rollout.planning.migration import InFlight
from rollout.processes import ProcessId, no_collection, redirect_output, write_stacks_on_signal
from rollout.tracing.forwards import Forwards
from rollout.transports.base import Channel
from rollout.types import GroupColumns, GroupId, GroupSummary, PromptGroup
from rollout.weights.announcement import Announcement
from rollout.weights.fingerprint_sums import Fingerprint, Lenience
from rollout.weights.manifest import Required, WeightManifest

MAX_CONCURRENCY = 1 << 16
"""Most concurrent calls to one engine; every waiting group is one call."""


@ray.remote(max_concurrency=MAX_CONCURRENCY)
class EngineActor:
    """One engine in a process of its own."""

    def __init__(self, spec: EngineSpec) -> None:
        redirect_output()
        write_stacks_on_signal()
        with no_collection():
            from rollout.engine.engine import Engine

            self._engine = Engine(spec.on_node(str(ray.get_runtime_context().get_node_id())))
        self._history_sender: HistorySender | None = None

    async def start(self) -> ProcessId:
        """See `Engine.start`."""
        with no_collection():  # vLLM imports most of its modules here
            await self._engine.start()
        _never_scan_again()  # what was imported
        return ProcessId.of_this_process(await self.node_id()).with_children()

    async def ping(self) -> None:
        """See `Engine.ping`."""
        await self._engine.ping()

    async def close(self) -> None:
        """See `Engine.shutdown`."""
        self._engine.shutdown()

    async def generate_group(
        self, group: PromptGroup, summary: GroupSummary | None = None, *parts_so_far: GroupColumns
    ) -> tuple[GroupSummary | GroupColumns | None, ...]:
        """See `Engine.generate_group`. Call it with `num_returns=1 + most_parts(group)`.

        Returns the summary, the parts of the tokens, and None for each part that the group does not have.
        """
        columns_so_far = joined(parts_so_far) if parts_so_far else None
        result, columns = await self._engine.generate_group(group, summary, columns_so_far)
        if self._history_sender is not None:
            self._history_sender.end(group)
        parts = split(columns)
        return (result, *parts, *[None] * (most_parts(group) - len(parts)))

    async def ended_at_least(self, count: int) -> int:
        """See `Engine.ended_at_least`."""
        return await self._engine.ended_at_least(count)

    async def in_flight(self) -> list[InFlight]:
        """See `Engine.in_flight`."""
        return self._engine.in_flight()

    async def abort(self, group_id: GroupId) -> int:
        """See `Engine.abort`."""
        return await self._engine.abort(group_id)

    async def hold(self) -> None:
        """See `Engine.hold`."""
        await self._engine.hold()

    async def release(self, group_ids: Sequence[GroupId]) -> None:
        """See `Engine.release`."""
        await self._engine.release(group_ids)

    async def pause_sampling(self) -> None:
        """See `Engine.pause_sampling`."""
        await self._engine.pause_sampling()

    async def resume_sampling(self) -> None:
        """See `Engine.resume_sampling`."""
        await self._engine.resume_sampling()

    async def init_transport(self, channel: Channel) -> None:
        """See `EngineWeights.init_transport`."""
        await self._engine.weights.init_transport(channel)

    async def required(self) -> list[Required]:
        """See `EngineWeights.required`."""
        return self._engine.weights.required

    async def built_model(self) -> BuiltModel | None:
        """See `EngineWeights.built`."""
        return self._engine.weights.built

    async def check(self, announced: Announcement, manifest: WeightManifest | None = None) -> None:
        """See `EngineWeights.accept`."""
        self._engine.weights.accept(announced, manifest)
        if manifest is not None:
            _never_scan_again()  # the manifest

    async def update(self, announced: Announcement, segments: Mapping[int, str], with_sums: bool = True) -> UpdateTimes:
        """See `EngineWeights.update`; the engine must hold the plan (`check`)."""
        weights = self._engine.weights
        return await weights.update(weights.announced(announced), segments, with_sums=with_sums)

    async def sleep(self) -> None:
        """See `EngineWeights.sleep`."""
        await self._engine.weights.sleep()

    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """See `EngineWeights.wake`."""
        await self._engine.weights.wake(part)

    async def start_over(self) -> None:
        """See `Engine.start_over`."""
        await self._engine.start_over()

    async def drain(self) -> None:
        """See `EngineWeights.drain`."""
        await self._engine.weights.drain()

    async def prove(self, expected: Fingerprint, lenience: Lenience, token_ids: list[int]) -> EngineProof:
        """See `EngineWeights.prove`."""
        return await self._engine.weights.prove(expected, lenience, token_ids)

    async def probe(self, token_ids: list[int]) -> list[float]:
        """See `EngineWeights.probe`."""
        return await self._engine.weights.probe(token_ids)

    async def resume(self) -> None:
        """See `EngineWeights.resume`."""
        await self._engine.weights.resume()

    async def fence(self, fault: str) -> None:
        """See `EngineWeights.fence`."""
        await self._engine.weights.fence(fault)

    async def node_id(self) -> str:
        """Ray's id of the engine's node."""
        return str(ray.get_runtime_context().get_node_id())

    async def progress(self) -> EngineProgress:
        """See `Engine.progress`."""
        return self._engine.progress()

    async def fault(self) -> str:
        """See `Engine.fault`."""
        return self._engine.fault()

    async def state(self) -> EngineState:
        """See `Engine.state`."""
        return self._engine.state()

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._engine.stats()

    async def drain_trace(self) -> Forwards:
        """See `Engine.drain_trace`."""
        return await self._engine.drain_trace()

    async def draft_stats(self, keeps_requests: bool = False) -> DraftStats:
        """See `Engine.draft_stats`."""
        return await self._engine.draft_stats(keeps_requests)

    async def connect_history(self, shards: Sequence[ray.actor.ActorHandle]) -> None:
        """Send finished responses to these shards from now on; see `HistorySender`."""
        self._history_sender = HistorySender(shards)
        self._engine.on_response_ended(self._history_sender.put)

    async def history_figures(self) -> tuple[DraftStats, int]:
        """Draft counters since the last call, and calls that no shard received, since the start."""
        num_lost = self._history_sender.num_lost_calls if self._history_sender is not None else 0
        return await self._engine.draft_stats(), num_lost

    async def kernel_classes(self) -> dict[str, str]:
        """See `Engine.kernel_classes`."""
        return await self._engine.kernel_classes()

    async def kernel_notes(self) -> list[str]:
        """See `Engine.kernel_notes`."""
        return await self._engine.kernel_notes()


def _never_scan_again() -> None:
    """Take all objects that live now out of later garbage collections, which block the event loop.

    A collection that scans the imported modules takes 0.4 s, one that scans the manifest of a large model 0.1 s.
    """
    gc.collect()
    gc.freeze()
