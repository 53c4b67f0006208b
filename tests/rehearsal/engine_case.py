"""An engine starts, sleeps, takes two publishes, samples, ends: `engine_case FORMAT DRAFTS SLEEP EAGER KV_FORMAT`."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollout.processes import ProcessEnv

os.environ.update(ProcessEnv(single_node=True).engine(threads=1))

from rollout.config import EngineConfig
from rollout.engine.engine import Engine
from rollout.engine.spec import DraftSpec, EngineSpec
from rollout.engine.state import EngineStatus
from rollout.transports.base import ShmChannel
from rollout.transports.shm import ShmSender
from rollout.types import FinishReason, GroupId, Prompt, PromptGroup, PromptId, SamplingSpec
from tests.rehearsal.stages import stage
from tests.support.engines.packing import RUN_ID, pack, stacked
from tests.support.engines.tiny_vllm_models import in_format, make_weights, save_checkpoint

FAMILY = "blocks"
PROBE = [1, 5, 6, 7, 8, 9]
GROUP = PromptGroup(
    group_id=GroupId(0),
    prompt=Prompt(
        prompt_id=PromptId("a"),
        token_ids=np.array([1, 5, 6, 7], dtype=np.int32),
        data_source="x",
        ground_truth="",
        extra_info_json="null",
    ),
    seeds=(1, 2, 3, 4),
    step=0,
    purpose="train",
    sampling=SamplingSpec(temperature=1.0, max_response_tokens=12, stop_token_ids=()),
)


def spec_of(
    directory: Path, segments: str, format: str, drafts: bool, sleep: int, eager: bool, kv_format: str
) -> EngineSpec:
    return EngineSpec(
        engine_id=0,
        run_id=RUN_ID,
        config=EngineConfig(
            format=format,
            kv_format=kv_format,
            bf16_first_layers=0,
            bf16_last_layers=0,
            sleep_level=sleep,
            kv_cache_bytes=64 << 20,
            max_num_seqs=8,
            vllm={"enforce_eager": True} if eager else {},
        ),
        directory=str(directory),
        max_model_len=256,
        drafts=DraftSpec(max_draft_tokens=4, segments_dir=segments) if drafts else None,
    )


class Case:
    """One engine, whose calls run on one event loop."""

    def __init__(self, spec: EngineSpec, family: str = FAMILY) -> None:
        self.engine, self._loop = Engine(spec), asyncio.new_event_loop()
        self._family = family

    def run(self, name: str, call: Callable[[], Coroutine[object, object, object]]) -> object:
        return stage(name, lambda: self._loop.run_until_complete(call()))

    async def publish(self, senders: list[ShmSender], version: int) -> None:
        format = self.engine.spec.config.format
        tensors = stacked(in_format(make_weights(self._family, 1), format))
        found = pack(tensors, version, format, num_ranks=2, required=self.engine.weights.required)
        segments = {rank: found.send(sender, rank) for rank, sender in enumerate(senders)}
        await self.engine.weights.update(found.manifest, segments)

    async def sleep_and_wake(self) -> None:
        await self.engine.weights.sleep()
        await self.engine.weights.wake("weights")
        await self.engine.weights.wake("kv_cache")

    async def generate(self) -> None:
        self.engine.weights.status = EngineStatus.APPLYING
        await self.engine.weights.resume()
        summary, columns = await self.engine.generate_group(GROUP)
        assert summary.lengths == (12,) * 4 and len(columns.rollout_logprobs) == 48, summary
        trace = await self.engine.drain_trace()
        assert len(trace) > 0
        drafted = (await self.engine.draft_stats()).num_drafted
        assert (drafted > 0) == (self.engine.spec.drafts is not None), drafted

    async def abort(self) -> None:
        """Responses of a group that ends early keep what they have."""
        group = replace(GROUP, group_id=GroupId(1), sampling=replace(GROUP.sampling, max_response_tokens=200))
        running = asyncio.ensure_future(self.engine.generate_group(group))
        while not any(max(each.emitted, default=0) for each in self.engine.in_flight()):
            await asyncio.sleep(0.01)
        aborted = await self.engine.abort(group.group_id)
        summary, columns = await running
        assert aborted == summary.finish_reasons.count(FinishReason.ABORT) > 0, summary
        assert 0 < len(columns.rollout_logprobs) == sum(summary.lengths) < 4 * 200, summary


def main(format: str, drafts: str, sleep: str, eager: str, kv_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = save_checkpoint(Path(folder) / "model", FAMILY, make_weights(FAMILY, 1), "bf16")
        segments = Path("/dev/shm") / f"mrl-rehearsal-{os.getpid()}"
        segments.mkdir()
        case = Case(spec_of(directory, str(segments), format, drafts == "1", int(sleep), eager == "1", kv_format))
        try:
            rehearse(case, sleeps=sleep != "0")
        finally:
            stage("shut down", case.engine.shutdown)
            segments.rmdir()


def rehearse(case: Case, *, sleeps: bool) -> None:
    weights = case.engine.weights
    case.run("start", case.engine.start)
    case.run("kernels", case.engine.kernel_classes)
    if sleeps:
        case.run("sleep and wake", case.sleep_and_wake)
    case.run("join shared memory", lambda: weights.init_transport(ShmChannel()))
    senders = [ShmSender(run_id=RUN_ID, rank=rank) for rank in range(2)]
    for version in (0, 1):
        case.run(f"publish {version}", lambda version=version: case.publish(senders, version))
        case.run(f"sums {version}", weights.loaded_fingerprint)
        case.run(f"probe {version}", lambda: weights.probe(PROBE))
    case.run("leave the channel", lambda: case.engine._handle.ranks("close_channel"))
    case.run("generate", case.generate)
    case.run("abort", case.abort)


if __name__ == "__main__":
    main(*sys.argv[1:])
