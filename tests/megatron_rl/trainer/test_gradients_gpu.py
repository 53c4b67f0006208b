"""Gradients of the Transformer Engine path on one CUDA device: their norm is that of Hugging Face's gradients."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from rollout.data.sft_rows import SftRows
from tests.megatron_rl.trainer.test_trainer import trainer_spec
from tests.support.trainers.tiny_megatron_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about their own future
]

EXAMPLE = "example with experts"
MICRO_BATCHES = (
    [[(20, 1)]],
    [[(9, 40), (17, 1), (30, 50)], [(23, 1)], [(4, 61)]],
    [[(27, 48), (31, 48), (25, 48), (29, 12)], [(21, 1), (33, 48), (27, 48), (22, 48)], [(1, 1)]],
    [[(20, 44)], [(64, 64)], [(63, 66), (2, 3)]],
    [[(26, 48)], [(24, 1)]],
)
"""Steps: micro batches of samples, by their tokens of prompt and response."""


def directory_of(family: str, work: Path) -> Path:
    if family != EXAMPLE:
        return save_model(family, work / "model", dtype=torch.bfloat16)
    for command in (
        ["-m", "examples.arithmetic.make_model", "--out", str(work / "dense")],
        ["-m", "tests.support.runs.expert_model", str(work / "dense"), str(work / "model")],
    ):
        subprocess.run([sys.executable, *command], check=True)
    return work / "model"


def leave_nan_in_freed_memory() -> None:
    """A kernel that reads what nothing has written gets NaN, not the zeros of fresh memory."""
    torch.cuda.empty_cache()  # else blocks that an earlier step has freed keep its numbers
    filled = [torch.full((1 << 28,), float("nan"), device="cuda")]
    filled += [torch.full((1 << 17,), float("nan"), device="cuda") for _ in range(400)]  # torch's pool of small blocks
    torch.cuda.synchronize()
    del filled


def norm_by_hugging_face(model: torch.nn.Module, samples: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Norm of the gradient of the mean negative log-probability of all response tokens."""
    model.zero_grad()
    count = sum(len(response) for _, response in samples)
    for prompt, response in samples:
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (-scores.gather(1, torch.from_numpy(response).long()[:, None]).sum() / count).backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


@pytest.mark.parametrize("family", ["blocks", "qwen3", "expert_blocks", EXAMPLE])
def test_the_norm_of_gradients_is_hugging_faces_for_every_length_of_samples(single_rank, tmp_path, family):
    from transformers import AutoModelForCausalLM

    from megatron_rl.trainer.trainer import Trainer

    directory = directory_of(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    spec = trainer_spec(directory, ParallelConfig(), AlgorithmConfig(), distributed=True)
    still = OptimizerConfig(learning_rate=1e-12, distributed=True)  # every step has the same weights
    trainer = Trainer(
        replace(spec, config=spec.config.model_copy(update={"dtype": "bf16", "optimizer": still})), single_rank
    )
    generator, found, expected = np.random.default_rng(0), [], []
    for lengths in [*MICRO_BATCHES, *MICRO_BATCHES]:
        samples = [
            tuple(generator.integers(3, 90, n).astype(np.int32) for n in pair) for micro in lengths for pair in micro
        ]
        ends = np.cumsum([len(micro) for micro in lengths])
        batch = SftBatch(
            micro_batches=(
                tuple(tuple(range(end - len(micro), end)) for micro, end in zip(lengths, ends, strict=True)),
            ),
            num_tokens=sum(len(response) for _, response in samples),
        )
        leave_nan_in_freed_memory()
        rows = SftRows(prompts=tuple(one for one, _ in samples), responses=tuple(one for _, one in samples))
        found.append(trainer.sft_step(batch, rows).metrics["actor/grad_norm"])
        norms = {name: float(p.main_grad.norm()) for name, p in trainer._model.named_parameters()}
        print(lengths, found[-1], sorted(norms.items(), key=lambda one: -one[1])[:4])  # shown if the test fails
        expected.append(norm_by_hugging_face(reference, samples))
    assert found == pytest.approx(expected, rel=0.25)
