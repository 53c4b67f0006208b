"""The Transformer Engine path on one CUDA device; runs in this process, so it is the only one that uses CUDA."""

import numpy as np
import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model.packed_batch import pack_batch
from tests.megatron_rl.model.test_parity_logits import samples
from tests.support.trainers.rank_functions import build_loaded
from tests.support.trainers.tiny_megatron_models import FAMILIES, reference_logits, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_the_transformer_engine_model_has_a_shard(single_rank, tmp_path, family):
    model = build_loaded(single_rank, ParallelConfig(), save_model(family, tmp_path / "model"), dtype="bf16")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert any("layer_norm_weight" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_on_the_device_are_close_to_hugging_face(single_rank, tmp_path, family):
    from megatron_rl.model.parallel import device

    directory = save_model(family, tmp_path / "model", dtype=torch.bfloat16)
    model = build_loaded(single_rank, ParallelConfig(), directory, dtype="bf16").train()
    batch = samples(0, [(5, 9), (1, 1), (20, 70)])
    scores = model(pack_batch(batch, multiple_of=16).to(device()), temperature=1.0)
    scores.logprobs.sum().backward()
    logits = [reference_logits(directory, [np.concatenate(sample)]) for sample in batch]
    expected = torch.cat(
        [
            rows.log_softmax(dim=1)[len(prompt) - 1 : -1].gather(1, torch.from_numpy(response).long()[:, None])[:, 0]
            for rows, (prompt, response) in zip(logits, batch, strict=True)
        ]
    )
    assert (scores.logprobs.cpu() - expected).abs().mean() < 0.1
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
