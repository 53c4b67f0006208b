"""Experts in 8 bits on a CUDA device: pushed and loaded ones compute the same, and fingerprints tell experts apart."""

import numpy as np
import pytest
import torch

from megatron_rl.controller.publisher import EXPERT_LENIENCY, MAX_WEIGHT_GAP
from tests.support.engines.engine_answers import answers_of, jobs_of_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def experts(checkpoints, tmp_path_factory):
    return answers_of(checkpoints, tmp_path_factory.mktemp("experts"), jobs_of_experts(checkpoints))


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8_block"])
def test_pushed_experts_compute_the_same_as_a_loaded_directory_through_a_b_a(experts, format):
    for weights, answer in zip("ABA", experts.answers[f"push-experts-ABA-{format}"], strict=True):
        expected = experts.fresh("experts", weights, format)
        assert answer["tokens"] == expected["tokens"]
        np.testing.assert_array_equal(answer["probe"], expected["probe"])
    a, b = (experts.fresh("experts", weights, format)["probe"] for weights in "AB")
    assert np.abs(np.subtract(a, b)).max() > 0.5


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8_block"])
def test_fingerprints_tell_experts_in_8_bits_apart(experts, format):
    for pushed in experts.answers[f"push-experts-ABA-{format}"]:
        found = pushed["sum_gaps"]
        assert found.pop("as meant")[0] < MAX_WEIGHT_GAP * EXPERT_LENIENCY / 2
        for fault, (size, where) in found.items():
            assert size > 3 * MAX_WEIGHT_GAP * EXPERT_LENIENCY, fault
            assert "model.layers.1.mlp.experts." in where, fault
