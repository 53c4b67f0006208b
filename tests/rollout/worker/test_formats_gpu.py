"""Every format on a CUDA device: pushed and loaded weights compute the same."""

import numpy as np
import pytest
import torch

from tests.support.engines.engine_answers import answers_of, jobs_of_formats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = ("bf16", "int8", "fp8_channel", "fp8_block")
FAMILY = "blocks"
"""Its layers have whole blocks, which `fp8_block` needs."""


@pytest.fixture(scope="module")
def answers(checkpoints, tmp_path_factory):
    return answers_of(checkpoints, tmp_path_factory.mktemp("formats"), jobs_of_formats(checkpoints, FAMILY, FORMATS))


@pytest.mark.parametrize("format", FORMATS)
def test_pushed_weights_compute_the_same_as_a_loaded_directory_through_a_b_a(answers, format):
    for weights, answer in zip("ABA", answers.answers[f"push-{FAMILY}-ABA-{format}"], strict=True):
        expected = answers.fresh(FAMILY, weights, format)
        assert answer["tokens"] == expected["tokens"]
        np.testing.assert_array_equal(answer["probe"], expected["probe"])
    a, b = (answers.fresh(FAMILY, weights, format)["probe"] for weights in "AB")
    assert np.abs(np.subtract(a, b)).max() > 0.5
