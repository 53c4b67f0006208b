"""An engine on a stub device emits tokens whose log-probabilities are the model's.

    numbers_case FAMILY FORMAT SLEEP KV_FORMAT

Kernels compute on the host here (`tests.support.stub_cuda.twins`, Triton's interpreter), behind the code path of GPUs.
The reference is Hugging Face's model with the same weights, dequantised, in float32.
"""

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers.models.auto import AutoModelForCausalLM

from rollout.engine.state import EngineStatus
from rollout.transports.base import ShmChannel
from rollout.transports.shm import ShmSender
from rollout.types import GroupId
from tests.rehearsal.engine_case import GROUP, PROBE, RUN_ID, Case, spec_of
from tests.rehearsal.stages import stage
from tests.support.engines.tiny_vllm_models import END_ID, in_format, make_weights, save_checkpoint

MOST = {"bf16": 0.2, "int8": 0.2, "fp8_channel": 0.4, "fp8_block": 0.4}
"""Largest difference of a log-probability: rounding of BF16, and of inputs to 8 bits, over two layers. Rounding also
chooses another expert where two are close."""
MEAN = {"bf16": 0.012, "int8": 0.04, "fp8_channel": 0.09, "fp8_block": 0.09}

NUM_TOKENS = 24


def dense(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A tensor in float32; codes times their scales."""
    wide = tensors[name].float()
    if f"{name}_scale" in tensors:
        return wide * tensors[f"{name}_scale"]
    if f"{name}_scale_inv" in tensors:
        return wide * tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return wide


class Reference:
    """The model in float32."""

    def __init__(self, folder: Path, family: str, format: str) -> None:
        tensors = in_format(make_weights(family, 1), format)
        wide = {name: dense(tensors, name) for name in tensors if not name.endswith(("_scale", "_scale_inv"))}
        directory = save_checkpoint(folder / "reference", family, wide, "bf16")
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """Of each token after the first."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logits = self._model(input_ids=ids).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


class NumbersCase(Case):
    """An engine, compared with the reference."""

    def compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        config = self.engine.spec.config
        format = "fp8_channel" if config.kv_format == "fp8" else config.format
        gaps = np.abs(found - expected)
        assert found.shape == expected.shape, (found.shape, expected.shape)
        print(f"largest difference of a log-probability {gaps.max():.4f}, mean {gaps.mean():.4f}")
        assert gaps.max() < MOST[format] and gaps.mean() < MEAN[format]

    async def sample(self, reference: Reference) -> None:
        """Twice with the same seeds; the second group is drafted from the text of the first."""
        self.engine.weights.status = EngineStatus.APPLYING
        await self.engine.weights.resume()
        for number in range(2):
            await self.responses(number, reference)
        stats = await self.engine.draft_stats()
        assert 0 < stats.num_accepted <= stats.num_drafted, stats
        print(f"drafted {stats.num_drafted}, accepted {stats.num_accepted}")

    async def responses(self, number: int, reference: Reference) -> None:
        sampling = replace(GROUP.sampling, max_response_tokens=NUM_TOKENS)
        _, columns = await self.engine.generate_group(replace(GROUP, group_id=GroupId(number), sampling=sampling))
        assert len(columns.rollout_logprobs) == len(columns.response_ids) == columns.offsets[-1]
        for begin, end in itertools.pairwise(columns.offsets):
            response = columns.response_ids[begin:end].tolist()
            assert len(response) == NUM_TOKENS or response[-1] == END_ID
            expected = reference.logprobs([*GROUP.prompt.token_ids.tolist(), *response])
            self.compare(columns.rollout_logprobs[begin:end], expected[-len(response) :])

    async def probe(self, reference: Reference) -> None:
        answer = await self.engine.weights.probe(PROBE)
        self.compare(np.asarray(answer), reference.logprobs(PROBE))


def main(family: str, format: str, sleep: str, kv_format: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = save_checkpoint(Path(folder) / "model", family, make_weights(family, 7), "bf16")
        segments = Path(folder) / "segments"
        segments.mkdir()
        case = NumbersCase(spec_of(directory, str(segments), format, True, int(sleep), True, kv_format), family)
        try:
            rehearse(case, Reference(Path(folder), family, format), sleeps=sleep != "0")
        finally:
            stage("shut down", case.engine.shutdown)


def rehearse(case: NumbersCase, reference: Reference, *, sleeps: bool) -> None:
    case.run("start", case.engine.start)
    case.run("join shared memory", lambda: case.engine.weights.init_transport(ShmChannel()))
    senders = [ShmSender(run_id=RUN_ID, rank=rank) for rank in range(2)]
    for version in range(1 + sleeps):
        if version:
            case.run("sleep and wake", case.sleep_and_wake)
        case.run(f"publish {version}", lambda version=version: case.publish(senders, version))
        case.run(f"probe {version}", lambda: case.probe(reference))
        case.run(f"sample {version}", lambda: case.sample(reference))


if __name__ == "__main__":
    main(*sys.argv[1:])
