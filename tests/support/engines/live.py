"""A started engine, and the means to publish to it."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from rollout.engine.engine import Engine
from rollout.transports.base import GroupChannel, ShmChannel
from rollout.transports.shm import ShmSender
from rollout.transports.store_server import StoreServer
from rollout.transports.streaming import GroupSender
from rollout.types import GroupColumns, GroupId, GroupSummary, Prompt, PromptGroup, PromptId, SamplingSpec
from tests.support.engines.engine_answers import Checkpoints
from tests.support.engines.packing import RUN_ID, Publish, pack, stacked


@dataclass
class Live:
    """All methods run the session's event loop until they are done, except the coroutines."""

    engine: Engine
    runner: asyncio.Runner
    checkpoints: Checkpoints
    format: str
    senders: list[ShmSender] = field(default_factory=lambda: [ShmSender(run_id=RUN_ID, rank=r) for r in range(2)])
    family: str = "qwen3"
    groups: int = 0
    before_publish_0: bool = False
    """Whether a group that was handed in before publish 0 was still waiting when the publish came."""

    def close(self) -> None:
        """End the engine, and release what is staged."""
        self.engine.shutdown()
        for sender in self.senders:
            sender.abandon()

    def tensors(self, weights: str) -> dict[str, torch.Tensor]:
        tensors = load_file(Path(self.checkpoints.path(self.family, weights, self.format)) / "model.safetensors")
        return stacked(tensors) if self.family == "experts" else tensors

    def publish(self, weights: str, version: int | None = None, **changes: object) -> Publish:
        if version is None:
            version = self.engine.state().weight_version + 1
        keys = {"num_ranks": 2, "required": self.engine.weights.required} | changes
        return pack(self.tensors(weights), version, self.format, **keys)

    def stage(self, publish: Publish) -> dict[int, str]:
        return {rank: publish.send(sender, rank) for rank, sender in enumerate(self.senders)}

    async def use_shm(self) -> None:
        await self.engine.weights.init_transport(ShmChannel())

    async def push(self, weights: str) -> None:
        """A valid publish through shared memory, until the engine serves it."""
        publish = self.publish(weights)
        await self.engine.weights.update(publish.manifest, self.stage(publish))
        await self.engine.weights.resume()

    async def use_gloo(self, timeout_s: float = 60) -> tuple[list[GroupSender], object]:
        """Returns the senders of two trainer ranks, and the store, which must stay alive."""
        store = StoreServer("127.0.0.1")
        channel = GroupChannel(
            store=store.address,
            source_ranks=(0, 1),
            num_engine_ranks=self.engine.spec.config.tensor_parallel,
            timeout_s=timeout_s,
        )
        senders = [GroupSender(run_id=RUN_ID, rank=rank, timeout_s=timeout_s) for rank in range(2)]
        joined = [asyncio.to_thread(sender.attach, 0, channel) for sender in senders]
        await asyncio.gather(self.engine.weights.init_transport(channel), *joined)
        return senders, store

    def group(self, seeds=(0,), prompt=(5, 9, 17, 33), **sampling: object) -> PromptGroup:
        self.groups += 1
        spec = {"temperature": 1.0, "max_response_tokens": 20} | sampling
        return PromptGroup(
            group_id=GroupId(self.groups),
            step=0,
            prompt=Prompt(
                prompt_id=PromptId("test/0"),
                data_source="test",
                token_ids=np.array(prompt, dtype=np.int32),
                ground_truth="",
                extra_info_json="null",
            ),
            sampling=SamplingSpec(**spec),
            seeds=tuple(seeds),
        )

    async def sample(self, **group: object) -> tuple[GroupSummary, GroupColumns]:
        return await self.engine.generate_group(self.group(**group))

    async def greedy(self) -> dict[str, list]:
        """Answers in the same form as the oracle's."""
        from tests.support.engines.oracle import NUM_TOKENS, PROBE, PROMPTS

        answers: dict[str, list] = {"tokens": [], "logprobs": []}
        for prompt in PROMPTS:
            _, columns = await self.sample(prompt=prompt, temperature=0.0, max_response_tokens=NUM_TOKENS)
            answers["tokens"].append(columns.response_ids.tolist())
            answers["logprobs"].append(columns.rollout_logprobs.tolist())
        answers["probe"] = await self.engine.weights.probe(PROBE)
        return answers

    async def until_emitted(self, num_tokens: int) -> None:
        """Wait until every response in flight has this many tokens."""
        from rollout.worker.vllm_compat import num_emitted_tokens

        while True:
            counts = [num_emitted_tokens(self.engine._llm, r.request_id) for r in self.engine._ledger._running]
            if counts and all(count is not None and count >= num_tokens for count in counts):
                return
            await asyncio.sleep(0.002)


def send_in_thread(publish: Publish, sender: GroupSender, rank: int, *, only: int | None = None) -> threading.Thread:
    """Send in a thread and ignore errors."""

    def send() -> None:
        with contextlib.suppress(RuntimeError):
            publish.send(sender, rank, only=only)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread
