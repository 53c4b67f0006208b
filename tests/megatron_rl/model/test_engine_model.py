import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from megatron_rl.model.engine_model import as_built, check_engine_models
from megatron_rl.model.spec import RopeScaling
from rollout.built_model import BuiltModel
from tests.support.model_specs import qwen_spec

LLAMA3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
SPEC = qwen_spec(rope_scaling=LLAMA3)

OTHERS = {
    "head_dim": 16,
    "rotary_dim": 4,
    "rope_type": "YaRNScalingRotaryEmbedding",
    "rope_theta": 1e6,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "logit_scale": 0.5,
    "tie_word_embeddings": True,
}


def test_equal_models_are_accepted_also_if_vllm_holds_whole_numbers():
    built = replace(as_built(SPEC), rope_theta=10000, rope_scaling=(8, 1, 4, 8192))
    check_engine_models(SPEC, {0: as_built(SPEC), 3: built})
    plain = qwen_spec(tied=True)
    check_engine_models(plain, {0: replace(as_built(plain), tie_word_embeddings=True)})


@pytest.mark.parametrize("name", [field.name for field in fields(BuiltModel)])
def test_every_difference_names_engine_field_and_both_values(name):
    expected = getattr(as_built(SPEC), name)
    other = replace(as_built(SPEC), **{name: OTHERS[name]})
    message = f"engine 1 has built another model.*{name} is {OTHERS[name]!r} in vLLM and {re.escape(repr(expected))} in"
    with pytest.raises(ValueError, match=message):
        check_engine_models(SPEC, {0: as_built(SPEC), 1: other})


def test_the_comparison_imports_neither_torch_nor_megatron():
    code = "import sys, megatron_rl.model.engine_model; sys.exit(sum(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
