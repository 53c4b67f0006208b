"""The list of tensors that an engine expects is the one that a checkpoint really holds."""

import json

import pytest
from safetensors.torch import load_file

from rollout.model_tensors import expected_tensors
from rollout.process_env import ProcessEnv


@pytest.mark.parametrize("format", ["bf16", "int8", "fp8_channel"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_expected_tensors_are_those_of_a_checkpoint(checkpoints, family, format):
    directory = checkpoints.path(family, "A", format)
    stored = load_file(directory / "model.safetensors")
    found = expected_tensors(str(checkpoints.path(family, "A", "bf16")), format)
    assert {(spec.name, spec.shape, spec.dtype) for spec in found} == {
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in stored.items()
    }


def test_an_unknown_format_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="'int4'"):
        expected_tensors(str(tmp_path), "int4")


def test_every_process_is_told_its_threads_and_to_stay_offline():
    env = ProcessEnv(single_node=True)
    for found in (env.controller(), env.trainer_rank(threads=3), env.engine(threads=2), env.scorer()):
        assert found["NUMBA_NUM_THREADS"] == "1" and found["HF_HUB_OFFLINE"] == "1"
    assert env.trainer_rank(threads=3)["OMP_NUM_THREADS"] == "3"
    assert env.scorer()["OMP_NUM_THREADS"] == "1"


def test_engines_are_bound_to_the_cores_they_are_given_and_to_none_otherwise():
    env = ProcessEnv(single_node=False)
    assert env.engine(threads=1)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env.engine(threads=2, cores=((0, 1), (2, 3)))["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert "GLOO_SOCKET_IFNAME" not in env.engine(threads=1)
