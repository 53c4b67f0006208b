import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.config import ParallelConfig
from megatron_rl.model.packed_batch import pack_batch
from tests.megatron_rl.model.test_parity_logits import samples
from tests.support.trainers.rank_functions import gradients
from tests.support.trainers.tiny_megatron_models import one_by_one, save_model

TEMPERATURE = 0.7
GRADIENT_FAMILIES = ("qwen2_tied", "qwen3", "llama3")
MICRO_BATCHES = [
    samples(2, [(5, 9), (1, 1), (20, 30)]),
    samples(3, [(3, 4)]),
    samples(4, [(2, 17), (8, 2)]),
    samples(5, [(9, 9)]),
]
COEFFICIENTS = [
    torch.randn(2, sum(len(response) for _, response in batch), generator=torch.Generator().manual_seed(index)) / 20
    for index, batch in enumerate(MICRO_BATCHES)
]


def reference_gradients(directory):
    """Scores by batch and gradients by name, of transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    scores = []
    for batch, weights in zip(MICRO_BATCHES, COEFFICIENTS, strict=True):
        logprobs, entropy = [], []
        for prompt, response in batch:
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()
            rows = model(ids[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
            logp = rows.log_softmax(dim=1)
            logprobs.append(logp.gather(1, ids[len(prompt) :, None])[:, 0])
            entropy.append(-(logp.exp() * logp).sum(dim=1))
        logprobs, entropy = torch.cat(logprobs), torch.cat(entropy)
        (weights[0] * logprobs + weights[1] * entropy).sum().backward()
        scores.append((logprobs.detach(), entropy.detach()))
    return scores, one_by_one({name: parameter.grad for name, parameter in model.named_parameters()})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    found = {}
    for family in (*GRADIENT_FAMILIES, "qwen3_moe"):
        directory = save_model(family, root / family)
        found[family] = directory, *reference_gradients(directory)
    return found


CASES = {
    "single": (ParallelConfig(), False, "none"),
    "dp2": (ParallelConfig(data=2), False, "none"),
    "tp2": (ParallelConfig(tensor=2), False, "none"),
    "tp2_sp": (ParallelConfig(tensor=2), True, "none"),
    "tp2_sp_selective": (ParallelConfig(tensor=2), True, "selective"),
    "tp2_sp_full": (ParallelConfig(tensor=2), True, "full"),
    "tp2_dp2": (ParallelConfig(tensor=2, data=2), True, "none"),
    "pp2_uneven": (ParallelConfig(pipeline=2), False, "none"),
    "pp3": (ParallelConfig(pipeline=3), False, "none"),
    "tp2_pp2_sp_full": (ParallelConfig(tensor=2, pipeline=2), True, "full"),
    "tp4_sp": (ParallelConfig(tensor=4), True, "none"),  # two ranks for each key/value head
}


WITH_EXPERTS = dict.fromkeys(("single", "tp2_sp", "pp2_uneven"), ("qwen3_moe",))
"""Cases whose partition a model with experts has, too."""
SPREAD = {
    "ep2": (ParallelConfig(data=2, expert=2), False, "none"),
    "pp2_ep2_full": (ParallelConfig(pipeline=2, data=2, expert=2), False, "full"),
}


@pytest.mark.parametrize(
    ("case", "family"),
    [
        *((case, family) for case in CASES for family in (*GRADIENT_FAMILIES, *WITH_EXPERTS.get(case, ()))),
        *((case, "qwen3_moe") for case in SPREAD),
    ],
)
def test_scores_and_gradients_of_every_partition_equal_those_of_hugging_face(ranks, models, family, case):
    directory, reference_scores, reference = models[family]
    parallel, sequence_parallel, recompute = (CASES | SPREAD)[case]
    if "moe" in family and parallel.tensor > 1:
        sequence_parallel = True  # Megatron trains experts over tensor ranks with it only
    batches = [pack_batch(batch, multiple_of=parallel.tensor) for batch in MICRO_BATCHES]
    results = ranks.run(gradients, directory, batches, COEFFICIENTS, sequence_parallel, recompute, parallel=parallel)
    covered = {name: torch.zeros(gradient.shape, dtype=torch.int64) for name, gradient in reference.items()}
    for rank, (scores, placed) in enumerate(results):
        data = rank // parallel.tensor % parallel.data
        for found, expected in zip(scores, reference_scores[data :: parallel.data], strict=bool(scores)):
            for value, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(value), wanted, atol=2e-5, rtol=1e-5)
        for shard, gradient in placed:
            wanted = reference[shard.hf_name]
            torch.testing.assert_close(
                torch.from_numpy(gradient),
                wanted[shard.hf_slices],
                atol=1e-5 * wanted.abs().max().item(),
                rtol=1e-4,
                msg=lambda message, name=shard.megatron_name: f"{name}: {message}",
            )
            covered[shard.hf_name][shard.hf_slices] += shard.owned
    replicas = {name: parallel.data // (parallel.expert if ".experts." in name else 1) for name in covered}
    assert all((count == replicas[name]).all() for name, count in covered.items())
