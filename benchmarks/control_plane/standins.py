"""Stand-ins for engines, trainer ranks, scorers and history: they answer at once, with answers of the real sizes.

A few Ray processes hold all stand-ins. A handle sends the number of its stand-in with each call, so every call of the
controller passes through Ray as in a run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import ray

from history.drafting.stats import DraftStats
from history.store.actors import ReaderReport, ShardReport
from history.store.prompt_store import StoreStats
from megatron_rl.trainer.messages import ProbeResult, StagedWeights, StepResult, TrainerProof
from megatron_rl.weights.quantization_stats import QuantizationStats
from rollout.engine.state import EngineProof, UpdateTimes
from rollout.group_parts import most_parts, num_parts
from rollout.processes import ProcessId
from rollout.rewards.text_actor import WrittenSamples
from rollout.tracing.forwards import FORWARD
from rollout.types import (
    FinishReason,
    GroupSummary,
    PromptGroup,
    Score,
    ScorerAnswer,
    ScoreStatus,
    WeightSpan,
    WeightVersion,
)
from rollout.weights.announcement import Announcement
from rollout.weights.fingerprint_sums import NUM_GROUPS, NUM_VECTORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the answers."""

    matrices: Sequence[str]
    """Names of the model's tensors that a proof sums."""
    layers: int
    mean_response_tokens: int
    num_forwards: int
    """Forwards of an engine in a step."""


def node_name(engine: int) -> str:
    """Name of an engine's node, which its ranks fill."""
    return f"node {engine}"


@ray.remote(num_cpus=0)
class Host:
    """Holds many stand-ins; each method is that of one role, called with the number of the stand-in."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._ended: dict[int, int] = {}
        self._version: dict[int, int] = {}

    async def generate_group(self, engine: int, group: PromptGroup, *_: object) -> tuple[object, ...]:
        """All responses of a group, of lognormal lengths, and a word for each part of their tokens."""
        generator = np.random.default_rng(group.group_id)
        mean, size = self._sizes.mean_response_tokens, len(group.seeds)
        lengths = np.maximum(generator.lognormal(np.log(mean) - 0.32, 0.8, size), 1).astype(int).tolist()
        self._ended[engine] = self._ended.get(engine, 0) + size
        version = self._version.get(engine, 0)
        summary = GroupSummary(
            group_id=group.group_id,
            engine_id=engine,
            num_prompt_tokens=len(group.prompt.token_ids),
            lengths=tuple(lengths),
            finish_reasons=(FinishReason.STOP,) * size,
            weight_spans=tuple((WeightSpan(weight_version=WeightVersion(version), num_tokens=n),) for n in lengths),
            started_at_s=time.time(),
            finished_at_s=time.time(),
        )
        parts = num_parts(lengths)
        return (summary, *["part"] * parts, *[None] * (most_parts(group) - parts))

    async def ended_at_least(self, engine: int, count: int) -> int:
        """Responses that have ended; the stand-in ends a group when it gets it."""
        return max(self._ended.get(engine, 0), count)

    async def in_flight(self, engine: int) -> list[object]:
        """Nothing runs between two calls."""
        del engine
        return []

    async def check(self, engine: int, announced: Announcement, manifest: object = None) -> None:
        """The manifest has travelled, or the version of a plan that the engine holds."""

    async def update(self, engine: int, announced: Announcement, segments: object, with_sums: bool) -> UpdateTimes:
        """A publish is applied."""
        del with_sums
        self._version[engine] = announced.weight_version
        return UpdateTimes(
            arrive_s=0.0, pause_s=0.0, apply_s=0.0, num_in_flight=0, num_recomputed_tokens=0, received_bytes=1
        )

    async def prove(self, engine: int, expected: object, lenience: object, token_ids: list[int]) -> EngineProof:
        """The sums have travelled."""
        del expected, lenience
        return EngineProof(weight_gap=0.0, where="", logprobs=_logprobs(token_ids))

    async def resume(self, engine: int) -> None:
        """The engine serves."""

    async def drain_trace(self, engine: int) -> np.ndarray:
        """Forwards since the last step."""
        forwards = np.zeros(self._sizes.num_forwards, dtype=FORWARD)
        forwards["started_at_s"] = time.time() + np.linspace(-1.0, 0.0, len(forwards))
        forwards["num_running"] = forwards["num_scheduled_tokens"] = np.linspace(64, 1, len(forwards))
        forwards["num_context_tokens"] = forwards["num_running"].astype(np.int64) * 7000
        forwards["seconds"] = 0.01 + 1e-5 * forwards["num_running"]
        return forwards

    async def draft_stats(self, engine: int, keeps_requests: bool) -> DraftStats:
        """Draft counters."""
        return DraftStats()

    async def history_figures(self, engine: int) -> tuple[DraftStats, int]:
        """No call was lost."""
        return DraftStats(), 0

    async def fault(self, engine: int) -> str:
        """The engine lives."""
        return ""

    async def start(self, engine: int) -> ProcessId:
        """The engine has started, on a node of its own."""
        return ProcessId(node_id=node_name(engine), pid=engine, start_ticks=0)

    async def process(self, rank: int) -> ProcessId:
        """The rank lives."""
        return ProcessId(node_id="", pid=rank, start_ticks=0)

    async def train(self, rank: int, batch: object) -> StepResult:
        """One step."""
        return StepResult(metrics={}, num_optimizer_steps=1, num_skipped_updates=0)

    async def stage(self, rank: int, version: int, with_sums: bool) -> StagedWeights:
        """One publish."""
        del with_sums
        codes = {layer: QuantizationStats(signal=1.0, noise=1e-4, num_codes=1) for layer in range(self._sizes.layers)}
        return StagedWeights(
            rank=rank,
            path=f"/dev/shm/{rank}",
            num_bytes=1,
            scales_s=0.0,
            pack_s=0.0,
            send_s=0.0,
            sums_s=0.0,
            fault="",
            codes=codes,
        )

    async def unstage(self, rank: int) -> None:
        """The publish is over."""

    async def proof(self, rank: int, token_ids: list[int]) -> TrainerProof:
        """Sums and probe of the first rank, which holds everything here; others hold none."""
        if rank:
            return TrainerProof(sums={}, probe=None)
        logprobs = np.asarray(_logprobs(token_ids), dtype=np.float32)
        return TrainerProof(sums=self._sums(), probe=ProbeResult(logprobs=logprobs))

    async def score(self, scorer: int, group: PromptGroup, *parts: object) -> ScorerAnswer:
        """Two kinds of rewards."""
        scores = tuple(Score(reward=float(sample % 2), status=ScoreStatus.OK) for sample in range(len(group.seeds)))
        return ScorerAnswer(scores=scores, process=ProcessId(node_id="", pid=scorer, start_ticks=0))

    async def alive(self, scorer: int) -> ProcessId:
        """See `ScorerActor.alive`."""
        return ProcessId(node_id="", pid=scorer, start_ticks=0)

    async def write_samples(self, scorer: int, groups: object, **_: object) -> WrittenSamples:
        """The samples are written."""
        return WrittenSamples(rows=[], process=ProcessId(node_id="", pid=scorer, start_ticks=0))

    async def publish(self, reader: int, order: object, shards: object) -> None:
        """A reader publishes segments."""

    async def add(self, reader: int, prompt_keys: object, shards: object) -> None:
        """A reader publishes segments on demand."""

    async def note_rewards(self, shard: int, step: int, rewards: object) -> None:
        """A shard stores rewards."""

    async def mark_filled(self, number: int) -> None:
        """A shard or reader is ready."""

    async def report(self, number: int) -> ShardReport | ReaderReport:
        """Counters; readers have negative numbers."""
        if number < 0:
            return ReaderReport(is_filled=True)
        return ShardReport(is_filled=True, stats=StoreStats(), returns=())

    def _sums(self) -> dict[str, np.ndarray]:
        ones = np.ones((2, NUM_VECTORS, NUM_GROUPS))
        return {name: ones.copy() for name in self._sizes.matrices}


def _logprobs(token_ids: list[int]) -> list[float]:
    return [-1.0] * (len(token_ids) - 1)


def start_host(sizes: Sizes) -> ray.actor.ActorHandle:
    """A process for stand-ins."""
    host: ray.actor.ActorClass = Host
    return host.remote(sizes)


class Handle:
    """Looks like the handle of an actor, and calls a stand-in."""

    def __init__(self, host: ray.actor.ActorHandle, number: int) -> None:
        self._host = host
        self._number = number

    def __getattr__(self, method: str) -> SimpleNamespace:
        if method.startswith("_"):
            raise AttributeError(method)
        remote, number = getattr(self._host, method), self._number

        def call(*arguments: object, **named: object) -> object:
            return remote.remote(number, *arguments, **named)

        def options(**changes: object) -> SimpleNamespace:
            changed = remote.options(**changes)
            return SimpleNamespace(remote=lambda *arguments: changed.remote(number, *arguments))

        return SimpleNamespace(remote=call, options=options)
