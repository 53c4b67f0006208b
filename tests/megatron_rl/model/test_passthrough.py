"""Fields of `trainer.megatron` change how a forward is computed, and neither log-probabilities nor gradients."""

import dataclasses
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.passthrough import FIELDS, OTHER_KEYS
from rollout.processes import ProcessEnv
from tests.support.trainers.tiny_megatron_models import save_model

VALUES: dict[str, object] = {"moe_router_dtype": "fp64", "recompute_method": "block", "recompute_num_layers": 3}
"""Values of fields that are not bool; those are set to the opposite of what they are."""

NEEDS_CUDA = {"deterministic_mode", "moe_permute_fusion", "moe_router_fusion"}
"""Fields whose kernels exist on GPUs only, or that a CPU has no use for."""


def gradients_by_field(position, parallel, directory, names, dtype="fp32"):
    """By field, "" without any: log-probabilities, and the gradient of their weighted sum by parameter."""
    from megatron_rl.model.build import ModelOptions, build, layer_names
    from megatron_rl.model.packed_batch import pack_batch
    from megatron_rl.model.parallel import device
    from megatron_rl.model.spec import read_model_spec
    from megatron_rl.weights.hf_load import load
    from megatron_rl.weights.shards import rank_shards

    spec = read_model_spec(directory)
    generator = np.random.default_rng(0)
    pairs = [tuple(generator.integers(1, 60, 9).astype(np.int32) for _ in range(2)) for _ in range(3)]
    batch = pack_batch(pairs, multiple_of=1).to(device())
    shards = rank_shards(
        spec, parallel, tensor_rank=0, pipeline_rank=0, data_rank=0, uses_te_layer_names=layer_names() == "te"
    )

    def gradients(name):
        recompute = "full" if name.startswith("recompute") or not name else "none"
        options = ModelOptions(dtype=dtype, recompute=recompute, chunk_tokens=7)
        (plain,) = build(spec, parallel, position, options)
        if name:
            value = value_of(name, plain.config)
            of_rank = ProcessEnv(single_node=True).trainer_rank(
                threads=1, is_deterministic=name == "deterministic_mode"
            )
            with patch.dict(os.environ, of_rank):
                (plain,) = build(spec, parallel, position, dataclasses.replace(options, megatron={name: value}))
            assert getattr(plain.config, name) == value
        load(plain, shards, spec, directory)
        logprobs = plain(batch, temperature=0.7).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
        found = {key: p.grad for key, p in plain.named_parameters() if p.grad is not None}
        return logprobs.detach().cpu().numpy(), {key: grad.float().cpu().numpy() for key, grad in found.items()}

    return {name: gradients(name) for name in ("", *names)}


def value_of(name, config):
    """Another value than the configuration's."""
    return VALUES.get(name, not getattr(config, name))


IN_TF32 = 20.0
"""Transformer Engine multiplies float32 in TF32, with 11 bits: on an H100 a fused rotary embedding moved
log-probabilities by 4e-4 of their size."""


def compare(ranks, directory, names, *, loose=1.0):
    (found,) = ranks.run(gradients_by_field, directory, sorted(names))
    logprobs, gradients = found.pop("")
    assert len(gradients) > 10
    for name, (its_logprobs, its_gradients) in found.items():
        np.testing.assert_allclose(its_logprobs, logprobs, rtol=1e-4 * loose, atol=1e-5 * loose, err_msg=name)
        assert its_gradients.keys() == gradients.keys(), name
        for parameter, gradient in its_gradients.items():
            largest = np.abs(gradients[parameter]).max() if loose > 1 else 0.0  # small sums cancel in TF32
            np.testing.assert_allclose(
                gradient, gradients[parameter], rtol=1e-3, atol=1e-5 + 1e-2 * largest, err_msg=f"{name}, {parameter}"
            )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_no_field_changes_log_probabilities_or_gradients(ranks, tmp_path, family):
    compare(ranks, save_model(family, tmp_path), FIELDS.keys() - NEEDS_CUDA)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_in_bf16_learns_with_every_field(ranks, tmp_path, family):
    names = sorted(FIELDS.keys() - NEEDS_CUDA)
    (found,) = ranks.run(gradients_by_field, save_model(family, tmp_path), names, "bf16")
    assert found.keys() == {"", *names}
    parameters = found[""][1].keys()
    for name, (logprobs, gradients) in found.items():
        assert np.isfinite(logprobs).all(), name
        assert gradients.keys() == parameters, name
        assert all(np.isfinite(gradient).all() for gradient in gradients.values()), name


def embeddings_gradients(position, parallel, directory, megatron):
    """Whether Megatron's mode is on, and five times the gradient of the embedding, [V, H], by several threads."""
    from megatron_rl.model.build import ModelOptions, build
    from megatron_rl.model.spec import read_model_spec

    (model,) = build(read_model_spec(directory), parallel, position, ModelOptions(dtype="fp32", megatron=megatron))
    embedding, found = model.embedding.word_embeddings, []
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 60, (1, 8192), generator=generator)
    upstream = torch.randn(ids.numel() * embedding.weight.shape[1], generator=generator)
    torch.set_num_threads(4)
    try:
        for _ in range(5):
            embedding.weight.grad = None
            embedding(ids).flatten().dot(upstream).backward()
            found.append(embedding.weight.grad.numpy().copy())
    finally:
        torch.set_num_threads(1)
    return model.config.deterministic_mode, found


def test_on_a_cpu_deterministic_mode_changes_no_bit_and_gradients_repeat_with_several_threads(ranks, tmp_path):
    directory = save_model("qwen3", tmp_path)
    (without,) = ranks.run(embeddings_gradients, directory, {})
    (found,) = ranks.run(embeddings_gradients, directory, {"deterministic_mode": True})
    assert not found[0] and np.abs(found[1][0]).max() > 0
    for gradient in (*without[1], *found[1]):
        np.testing.assert_array_equal(gradient, without[1][0])


def values_beside_tensor_parallelism(position, parallel, directory, names):
    """By field, the value asked for and the one in Megatron's configuration of one of two tensor-parallel ranks."""
    from megatron_rl.model.build import ModelOptions, transformer_config
    from megatron_rl.model.spec import read_model_spec

    spec, options = read_model_spec(directory), ModelOptions(dtype="bf16", recompute="full")
    plain = transformer_config(spec, ParallelConfig(tensor=2), options)
    assert plain.sequence_parallel
    asked = {name: value_of(name, plain) for name in names}
    configs = {
        name: transformer_config(
            spec, ParallelConfig(tensor=2), dataclasses.replace(options, megatron={name: asked[name]})
        )
        for name in names
    }
    return {name: (asked[name], getattr(config, name)) for name, config in configs.items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_megatron_accepts_every_field_beside_tensor_parallelism_and_recomputing(ranks, tmp_path, family):
    names = sorted(FIELDS.keys() - NEEDS_CUDA)
    (found,) = ranks.run(values_beside_tensor_parallelism, save_model(family, tmp_path), names)
    assert found.keys() == set(names)
    assert all(asked == present for asked, present in found.values()), found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_on_a_gpu_no_field_changes_log_probabilities_or_gradients(ranks, tmp_path, family):
    compare(ranks, save_model(family, tmp_path), FIELDS.keys(), loose=IN_TF32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"moe_router_dtyp": "fp32"}, "did you mean `moe_router_dtype`"),
        ({"num_layers": 3}, "`num_layers` is not a field that may be set here"),
        ({"attention_backend": "flash"}, "`attention_backend` is not a field that may be set here"),
        ({"moe_z_loss_coeff": 1e-3}, "`moe_z_loss_coeff` is refused: Megatron would count it once for every token"),
        ({"fp8_param": True}, "`trainer.fp8` sets it"),
        ({"fp32_residual_connection": True}, "whose FP32 output BF16 layers cannot take; remove it"),
        ({"distribute_saved_activations": True}, "`distribute_saved_activations` is refused: sequence parallelism"),
        ({"recompute_num_layers": True}, "`recompute_num_layers` = True must be of type int"),
        ({"recompute_num_layers": 0}, "`recompute_num_layers` = 0 must be at least 1"),
        ({"recompute_method": "blocks"}, "`recompute_method` = blocks: Megatron knows uniform and block"),
        ({"moe_router_dtype": "float32"}, "`moe_router_dtype` = float32: Megatron knows fp32 and fp64; set it to one"),
        ({"moe_router_dtype": ""}, "Megatron knows fp32 and fp64"),
    ],
)
def test_other_fields_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(megatron=fields)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("fields", [{"recompute_num_layers": 4}, {"recompute_method": "block"}])
def test_fields_of_full_recomputation_are_refused_without_it(recompute, fields):
    ((name, value),) = fields.items()
    message = f"`trainer.megatron` sets {name} = {value}, which `trainer.recompute` = {recompute} does not read; set"
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(recompute=recompute, megatron=fields)
    assert TrainerConfig(recompute="full", megatron=fields).megatron == fields


def test_no_refused_field_may_be_set():
    assert not FIELDS.keys() & OTHER_KEYS.keys()
