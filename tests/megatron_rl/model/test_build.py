import numpy as np
import pytest
import torch

from megatron_rl.config import ParallelConfig
from tests.support.trainers.rank_functions import build_loaded
from tests.support.trainers.tiny_megatron_models import save_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_model("qwen3_tied", tmp_path_factory.mktemp("model"))


def in_fp8(position, parallel, directory, fp8):
    from megatron_rl.model.build import ModelOptions, build
    from megatron_rl.model.spec import read_model_spec

    build(read_model_spec(directory), parallel, position, ModelOptions(dtype="bf16", fp8=fp8))


def test_fp8_is_refused_without_a_device_for_it(ranks, directory):
    with pytest.raises(RuntimeError, match=r"trainer\.fp8 = blockwise_param needs a CUDA device, which is not here"):
        ranks.run(in_fp8, directory, "blockwise_param")


def parameter_attributes(position, parallel, directory):
    model = build_loaded(position, parallel, directory)
    return {
        name: (
            tuple(parameter.shape),
            getattr(parameter, "tensor_model_parallel", False),
            getattr(parameter, "sequence_parallel", False),
        )
        for name, parameter in model.named_parameters()
    }


def test_parameters_are_marked_for_gradient_norm_and_sequence_parallelism(ranks, directory):
    first, second = ranks.run(parameter_attributes, directory, parallel=ParallelConfig(tensor=2))
    assert first == second
    for name, (shape, tensor_parallel, sequence_parallel) in first.items():
        assert tensor_parallel == (len(shape) == 2), name
        assert sequence_parallel == ("norm" in name), name


def padded_rows(position, parallel, directory):
    model = build_loaded(position, parallel, directory)
    return model.embedding.word_embeddings.weight.detach().numpy()


def test_padded_vocabulary_rows_are_loaded_as_zero(ranks, directory):
    parts = ranks.run(padded_rows, directory, parallel=ParallelConfig(tensor=2))
    rows = torch.cat([torch.from_numpy(part) for part in parts])
    assert len(rows) == 256
    assert rows[:150].any(dim=1).all() and not rows[150:].any()


def random_weights(position, parallel, directory):
    from megatron_rl.model.build import ModelOptions, build
    from megatron_rl.model.spec import read_model_spec

    (model,) = build(read_model_spec(directory), parallel, position, ModelOptions(dtype="fp32", random_weights=True))
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    return weight.std().item(), weight[0, :4].tolist()


def test_random_weights_differ_between_tensor_parallel_ranks(ranks, directory):
    (std, first), (_, second) = ranks.run(random_weights, directory, parallel=ParallelConfig(tensor=2))
    assert std == pytest.approx(0.02, rel=0.05)
    assert first != second


def forwards_of_lengths(position, parallel, directory, lengths):
    """Rotary tables that are kept after a forward and backward of each length, and log-probabilities of equal batches
    before and after them.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_rl.model.packed_batch import pack_batch
    from megatron_rl.model.parallel import device

    model = build_loaded(position, parallel, directory, recompute="full")

    def logprobs(length):
        ids = np.arange(1, 1 + length, dtype=np.int32) % 60
        batch = pack_batch([(ids[:2], ids), (ids[:1], ids[:3])]).to(device())
        return model(batch, temperature=1.0).logprobs

    before, kept = logprobs(7).detach().cpu().numpy(), []
    for length in lengths:
        scores = logprobs(length)
        kept.append(RotaryEmbedding.forward.cache_info().currsize)
        scores.sum().backward()
        kept.append(RotaryEmbedding.forward.cache_info().currsize)
    return kept, before, logprobs(7).detach().cpu().numpy()


def test_no_table_of_rotary_angles_stays_after_a_forward(ranks, directory):
    ((kept, before, after),) = ranks.run(forwards_of_lengths, directory, range(5, 15))
    assert kept == [0] * 20
    assert np.array_equal(before, after)


def unpacked(position, parallel, directory):
    model = build_loaded(position, parallel, directory)
    attention = model.decoder.layers[0].self_attention.core_attention
    heads = torch.zeros(4, 2, 8)
    attention(heads, heads, heads, None)


def test_attention_refuses_a_batch_that_is_not_packed(ranks, directory):
    with pytest.raises(RuntimeError, match="without packed_seq_params"):
        ranks.run(unpacked, directory)
