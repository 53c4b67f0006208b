"""The Transformer Engine path on one CUDA device: gradients are those of Hugging Face, and repeat if they shall."""

import math
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.batching.sft_batch import SftBatch
from megatron_rl.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from rollout.data.sft_rows import SftRows
from rollout.processes import DETERMINISTIC, ProcessEnv
from tests.megatron_rl.trainer.test_trainer import trainer_spec
from tests.support.trainers.tiny_megatron_models import one_by_one, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about their own future
]

EXAMPLE = "example with experts"
DENSE = ("blocks", "qwen3")
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


def gradients_by_hugging_face(
    model: torch.nn.Module, samples: list[tuple[np.ndarray, np.ndarray]]
) -> dict[str, torch.Tensor]:
    """Gradients of the mean negative log-probability of all response tokens, by the names of the files."""
    model.zero_grad()
    count = sum(len(response) for _, response in samples)
    for prompt, response in samples:
        ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
        scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (-scores.gather(1, torch.from_numpy(response).long()[:, None]).sum() / count).backward()
    return one_by_one({name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})


def gradients_of(trainer) -> dict[str, torch.Tensor]:
    """Gradients of the trainer's last step, by Hugging Face's names; NaN where no shard has a place."""
    parameters = dict(trainer._model.named_parameters())
    found = {shard.hf_name: torch.full(shard.hf_full_shape, torch.nan) for shard in trainer._held}
    for shard in trainer._held:
        values = parameters[shard.megatron_name].main_grad[shard.megatron_slices]
        found[shard.hf_name][shard.hf_slices] = values.float().cpu()
    return found


def compare(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Cosine between two gradients of a tensor, and ratio of their norms; (0, inf or 0) if one of them is zero."""
    norms = float(found.norm()), float(expected.norm())
    if norms == (0.0, 0.0):  # of an expert without tokens
        return 1.0, 1.0
    if 0.0 in norms:
        return 0.0, math.inf if norms[0] else 0.0
    return float((found * expected).sum()) / (norms[0] * norms[1]), norms[0] / norms[1]


@pytest.mark.parametrize("family", ["blocks", "qwen3", "expert_blocks", EXAMPLE])
def test_every_gradient_is_hugging_faces_for_every_length_of_samples(single_rank, tmp_path, family):
    """Of every tensor of a dense model; with experts, of the median tensor of each kind. In BF16, a router sends some
    tokens to other experts than in FP32, and an expert of few tokens may lose most of its gradient.
    """
    from transformers import AutoModelForCausalLM

    from megatron_rl.trainer.trainer import Trainer

    directory = directory_of(family, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    spec = trainer_spec(directory, ParallelConfig(), AlgorithmConfig(), distributed=True)
    # every step has the same weights, and no clip scales the gradients
    still = OptimizerConfig(learning_rate=1e-12, clip_grad=0.0, distributed=True)
    trainer = Trainer(
        replace(spec, config=spec.config.model_copy(update={"dtype": "bf16", "optimizer": still})), single_rank
    )
    generator, found, expected = np.random.default_rng(0), [], []
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
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
        gradients, own = gradients_by_hugging_face(reference, samples), gradients_of(trainer)
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert own[name].isfinite().all(), (name, lengths)
            kind = name if family in DENSE else re.sub(r"\d+", "*", name)
            pairs[kind].append(compare(own[name], gradient))
        expected.append(float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm()))
    assert found == pytest.approx(expected, rel=0.05 if family in DENSE else 0.25)
    of_kind = (lambda values: values) if family in DENSE else (lambda values: [statistics.median(values)])
    for kind, of_tensors in pairs.items():
        cosines, ratios = map(of_kind, zip(*of_tensors, strict=True))
        assert min(cosines) > 0.99, kind
        assert 0.95 < min(ratios) <= max(ratios) < 1.05, kind


@pytest.fixture
def deterministic(monkeypatch):
    """The variables of a deterministic trainer rank; afterwards torch is as before."""
    variables = ProcessEnv(single_node=True).trainer_rank(threads=1, is_deterministic=True)
    for name in DETERMINISTIC:
        monkeypatch.setenv(name, variables[name])
    yield
    torch.use_deterministic_algorithms(False)


def weights_around_two_steps(spec, position, batch, rows) -> list[dict[str, torch.Tensor]]:
    """Weights of a new trainer before its first step and after its second one, by name."""
    from megatron_rl.trainer.trainer import Trainer

    trainer = Trainer(spec, position)

    def weights() -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in trainer._model.named_parameters()}

    before = weights()
    for _ in range(2):
        trainer.sft_step(batch, rows)
    return [before, weights()]


@pytest.mark.parametrize(
    ("family", "fp8"),
    [*((family, "none") for family in ("blocks", "qwen3", "expert_blocks", EXAMPLE)), ("blocks", "blockwise")],
)
def test_two_deterministic_trainers_have_bitwise_equal_weights_after_two_steps(
    single_rank, tmp_path, deterministic, family, fp8
):
    """Rows are many tokens of few kinds, and experts get several of each: sums that may have any order."""
    if fp8 != "none" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a CUDA device of compute capability 9.0")
    spec = trainer_spec(directory_of(family, tmp_path), ParallelConfig(), AlgorithmConfig(), distributed=True)
    changes = {"dtype": "bf16", "fp8": fp8, "megatron": {"deterministic_mode": True}}
    spec = replace(spec, config=spec.config.model_copy(update=changes))
    generator = np.random.default_rng(0)
    rows = SftRows(
        prompts=tuple(generator.integers(3, 20, 31).astype(np.int32) for _ in range(64)),
        responses=tuple(generator.integers(3, 20, 33).astype(np.int32) for _ in range(64)),
    )
    halves = tuple(tuple(range(start, start + 32)) for start in (0, 32))
    batch = SftBatch(micro_batches=(halves,), num_tokens=64 * 33)
    (start, first), (_, second) = (weights_around_two_steps(spec, single_rank, batch, rows) for _ in range(2))
    assert first.keys() == second.keys()
    assert any(not torch.equal(weight, start[name]) for name, weight in first.items())
    assert [name for name, weight in first.items() if not torch.equal(weight, second[name])] == []
