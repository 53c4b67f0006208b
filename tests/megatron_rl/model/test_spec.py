import json
import subprocess
import sys

import pytest

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import RopeScaling, check_parallel, read_model_spec, stage_layers
from tests.support.trainers.tiny_megatron_models import FAMILIES, config_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 150,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}


MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(directory, **changes):
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return read_model_spec(directory)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_equals_transformers_configuration(tmp_path, family):
    config = config_of(family)
    config.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    assert spec.family == config.model_type
    assert spec.num_layers == config.num_hidden_layers
    assert spec.hidden_size == config.hidden_size
    assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.vocab_size == config.vocab_size
    assert spec.ffn_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
    if spec.experts is not None:
        assert (spec.experts.count, spec.experts.per_token) == (config.num_experts, config.num_experts_per_tok)
        assert spec.experts.normalised == config.norm_topk_prob
    assert (spec.tied, spec.rms_eps) == (config.tie_word_embeddings, config.rms_norm_eps)
    assert spec.rope_theta == config.rope_parameters["rope_theta"]
    assert (spec.rope_scaling is not None) == (config.rope_parameters["rope_type"] == "llama3")


def test_rotary_keys_of_older_transformers_are_read(tmp_path):
    spec = spec_of(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3)
    assert spec.rope_theta == 500000.0
    assert spec.rope_scaling == RopeScaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


@pytest.mark.parametrize("empty", [None, {}])
def test_rotary_keys_of_both_forms_are_read_if_they_mean_the_same(tmp_path, empty):
    expected = spec_of(tmp_path, rope_theta=500000.0, rope_scaling=LLAMA3)
    both = {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "rope_scaling": LLAMA3, "rope_theta": 500000.0}
    assert spec_of(tmp_path, **both) == expected
    assert spec_of(tmp_path, **both | {"rope_scaling": empty}) == expected
    assert spec_of(tmp_path, **both | {"rope_parameters": empty}) == expected


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, LLAMA3),
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "default"}),
        (LLAMA3, LLAMA3 | {"factor": 8.0}),
    ],
)
def test_rotary_tables_that_differ_are_refused_naming_both(tmp_path, parameters, scaling):
    from transformers import AutoConfig

    with pytest.raises(ValueError, match=r"rope_parameters = \{.* and rope_scaling = \{.*; remove the one"):
        spec_of(tmp_path, rope_parameters=parameters, rope_scaling=scaling)
    read = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert read == {"rope_theta": 10000.0} | scaling  # transformers reads the older table alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported.*llama, qwen2, qwen3, qwen3_moe"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*needs 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": YARN}, "rope_type 'yarn' in rope_scaling"),
        ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_type 'yarn' in rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5.*needs 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 4096}, "sliding_window = 4096.*absent"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5.*needs 1"),
        ({"qkv_bias": True}, "qkv_bias = True"),
        ({"bias": True}, "[^_]bias = True"),
        ({"is_causal": False}, "is_causal = False"),
        ({"dual_chunk_attention_config": {"chunk_size": 8192}}, "dual_chunk_attention_config = .*absent"),
        ({"model_type": "qwen2", "qk_norm": True}, "qk_norm = True"),
        (MOE | {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size = 32"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.*absent"),
        ({"hidden_size": None}, "hidden_size is None; needs a positive integer"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_key_value_heads": 3}, "8 is no multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        (MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_unsupported_architecture_options_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        spec_of(tmp_path, **changes)


def test_keys_that_change_nothing_are_accepted(tmp_path):
    expected = spec_of(tmp_path)
    assert spec_of(tmp_path, sliding_window=None, logit_scale=1.0, is_causal=True, qkv_bias=False) == expected
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    assert spec_of(tmp_path, rope_parameters=rope) == expected
    window = {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert spec_of(tmp_path, **window) == spec_of(tmp_path, model_type="qwen2")


def test_a_directory_without_readable_configuration_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, r"tensor = 3 does not divide the model's 8 attention heads; .*: 1, 2, 4, 8"),
        ({"pipeline": 4}, r"pipeline = 4 is more than the model's 3 layers; needs at most 3"),
    ],
)
def test_a_partition_that_does_not_fit_names_value_bound_and_fix(tmp_path, parallel, message):
    with pytest.raises(ValueError, match=message):
        check_parallel(spec_of(tmp_path), ParallelConfig(**parallel))


def test_ranks_may_share_key_heads_if_their_number_is_a_multiple(tmp_path):
    check_parallel(spec_of(tmp_path), ParallelConfig(tensor=8))
    spec = spec_of(tmp_path, num_attention_heads=12, hidden_size=288)
    check_parallel(spec, ParallelConfig(tensor=12))
    with pytest.raises(ValueError, match=r"tensor = 6 does not divide the model's 4 key/value heads; .*: 1, 2, 4, 12"):
        check_parallel(spec, ParallelConfig(tensor=6))


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({}, {"data": 2, "expert": 2}, "expert = 2 does not divide a model without experts; 1 always does"),
        (MOE, {"data": 3, "expert": 3}, "expert = 3 does not divide the model's 8 experts"),
        (MOE, {"data": 2, "expert": 4}, "expert = 4 does not divide trainer.parallel.data = 2"),
    ],
)
def test_experts_that_do_not_divide_over_ranks_are_refused(tmp_path, changes, parallel, message):
    with pytest.raises(ValueError, match=message):
        check_parallel(spec_of(tmp_path, **changes), ParallelConfig(**parallel))


def test_a_partition_that_fits_is_accepted(tmp_path):
    check_parallel(spec_of(tmp_path), ParallelConfig(tensor=4, pipeline=3, data=5))
    check_parallel(spec_of(tmp_path, **MOE), ParallelConfig(tensor=4, data=8, expert=4))


def test_remaining_layers_go_to_the_first_stages():
    assert stage_layers(7, 3) == (range(0, 3), range(3, 5), range(5, 7))
    assert stage_layers(4, 2) == (range(0, 2), range(2, 4))


@pytest.mark.parametrize("module", ["megatron_rl.model.spec", "megatron_rl.weights.shards"])
def test_pure_modules_import_neither_torch_nor_megatron(module):
    code = f"import sys, {module}; sys.exit(sum(m in sys.modules for m in ('torch', 'megatron', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
