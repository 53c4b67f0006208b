"""The tensors that an engine expects are those of a real checkpoint."""

import pytest
from safetensors.torch import load_file

from rollout.processes import ProcessEnv
from rollout.weights.checkpoint_tensors import expected_tensors, linears_in_bf16
from rollout.weights.format import WeightFormat
from tests.support.engines.packing import stacked


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "experts"])
def test_expected_tensors_equal_those_of_a_checkpoint(checkpoints, family, format):
    directory = checkpoints.path(family, "A", format)
    stored = stacked(load_file(directory / "model.safetensors"))
    found = expected_tensors(str(checkpoints.path(family, "A", "bf16")), WeightFormat(name=format))
    assert {(spec.name, spec.shape, spec.dtype) for spec in found} == {
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in stored.items()
    }


def test_excepted_layers_and_modules_stay_bfloat16_and_are_named_to_vllm(checkpoints):
    directory = str(checkpoints.path("qwen3", "A", "bf16"))
    format = WeightFormat(name="int8", bf16_first_layers=1, bf16_modules=("*.mlp.down_proj",))
    found = expected_tensors(directory, format)
    codes = {spec.name for spec in found if spec.dtype == "int8"}
    names = [f"model.layers.1.{leaf}" for leaf in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")]
    names += [f"model.layers.1.{leaf}" for leaf in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")]
    assert codes == {f"{name}.weight" for name in names}
    assert {spec.name for spec in found if spec.name.endswith("_scale")} == {f"{name}.weight_scale" for name in names}
    kept = linears_in_bf16(found)
    assert len(kept) == 8 and "model.layers.1.mlp.down_proj" in kept and "model.layers.0.self_attn.q_proj" in kept


def test_experts_and_routers_in_bfloat16_are_named_to_vllm_in_its_own_form(checkpoints):
    directory = str(checkpoints.path("experts", "A", "bf16"))
    format = WeightFormat(name="int8", bf16_first_layers=1)
    kept = linears_in_bf16(expected_tensors(directory, format))
    assert "model.layers.0.mlp.experts.3.down_proj" in kept
    routers = [name for name in kept if name.startswith("model.layers.1.")]
    assert routers == ["model.layers.1.mlp.gate"]


def test_every_process_gets_its_threads_and_stays_offline():
    env = ProcessEnv(single_node=True)
    for found in (env.controller(), env.trainer_rank(threads=3), env.engine(threads=2), env.single_threaded()):
        assert found["NUMBA_NUM_THREADS"] == "1" and found["HF_HUB_OFFLINE"] == "1"
    assert env.trainer_rank(threads=3)["OMP_NUM_THREADS"] == "3"
    assert env.single_threaded()["OMP_NUM_THREADS"] == "1"


def test_engines_are_bound_only_to_the_cores_they_are_given():
    env = ProcessEnv(single_node=False)
    assert env.engine(threads=1)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env.engine(threads=2, cores=((0, 1), (2, 3)))["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "GLOO_SOCKET_IFNAME" not in env.engine(threads=1)
