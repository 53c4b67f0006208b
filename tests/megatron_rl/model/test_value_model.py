"""The critic's model: hidden states of Hugging Face times the head, and their gradients, under every partition."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.config import ParallelConfig
from megatron_rl.model.packed_batch import pack_batch
from tests.megatron_rl.model.test_parity_gradients import COEFFICIENTS, MICRO_BATCHES
from tests.support.trainers.rank_functions import value_gradients
from tests.support.trainers.tiny_megatron_models import SHARED, one_by_one, save_model

HEAD = torch.randn(SHARED["hidden_size"], generator=torch.Generator().manual_seed(7)) / 8
CASES = {
    "single": ("qwen2_tied", ParallelConfig(), None),
    "tp2": ("qwen2_tied", ParallelConfig(tensor=2), False),
    "tp2_sp_pp2": ("qwen2_tied", ParallelConfig(tensor=2, pipeline=2), True),
    "tp2_dp2": ("qwen3", ParallelConfig(tensor=2, data=2), True),
    "ep2_pp2": ("qwen3_moe", ParallelConfig(pipeline=2, data=2, expert=2), None),
}


def reference(directory):
    """Values by batch and gradients by name, of transformers, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    head, values = HEAD.clone().requires_grad_(), []
    for batch, weights in zip(MICRO_BATCHES, COEFFICIENTS, strict=True):
        rows = []
        for prompt, response in batch:
            ids = torch.from_numpy(np.concatenate([prompt, response])).long()
            hidden = model(ids[None], output_hidden_states=True).hidden_states[-1][0]
            rows.append(hidden[len(prompt) - 1 : -1] @ head)
        found = torch.cat(rows)
        (weights[0] * found).sum().backward()
        values.append(found.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values, one_by_one(gradients) | {"head": head.grad}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_of_every_partition_equal_a_head_on_hugging_face_s_hidden_states(ranks, tmp_path, case):
    family, parallel, sequence_parallel = CASES[case]
    expected, wanted = reference(save_model(family, tmp_path))
    batches = [pack_batch(batch, multiple_of=parallel.tensor) for batch in MICRO_BATCHES]
    results = ranks.run(
        value_gradients, tmp_path, batches, [pair[0] for pair in COEFFICIENTS], HEAD, sequence_parallel,
        parallel=parallel,
    )  # fmt: skip
    seen = set()
    for rank, (values, placed) in enumerate(results):
        data = rank // parallel.tensor % parallel.data
        for found, value in zip(values, expected[data :: parallel.data], strict=bool(values)):
            torch.testing.assert_close(torch.from_numpy(found), value, atol=2e-5, rtol=1e-5)
        for name, box, gradient in placed:
            right = wanted[name][box]
            scale = 1e-5 * wanted[name].abs().max().item()
            torch.testing.assert_close(torch.from_numpy(gradient), right, atol=scale, rtol=1e-4, msg=name)
            seen.add(name)
    assert seen == wanted.keys()


def test_a_new_critic_values_every_state_at_zero(ranks, tmp_path):
    save_model("qwen3_tied", tmp_path)
    batches = [pack_batch(MICRO_BATCHES[0])]
    ((values, _),) = ranks.run(value_gradients, tmp_path, batches, [COEFFICIENTS[0][0]], None, None)
    assert not values[0].any()
