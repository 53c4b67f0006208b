"""Refused before a start: what Megatron's first forward or vLLM's engines would refuse, and keys without a use."""

from dataclasses import replace

import pytest

from launcher.checks.further_models import critic_problems
from launcher.checks.model import forward_problems, model_problems, recompute_problems, sft_problems
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig, SftConfig
from megatron_rl.config import TrainerConfig
from rollout.config import EngineConfig
from tests.support.model_specs import qwen_spec

SPEC = qwen_spec(num_layers=10)
CPU = NodeResources(cpu_cores=8, available_bytes=1 << 40, gpu_bytes=())
GPU = replace(CPU, gpu_bytes=(80 << 30,), gpu_capability=(9, 0))
BASE = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "x"}]}}


@pytest.mark.parametrize(
    ("recompute", "pipeline", "megatron", "said"),
    [
        ("full", 1, {"recompute_num_layers": 4}, ["recompute_num_layers = 4", "the 10 layers", "10 and its divisors"]),
        ("full", 2, {"recompute_num_layers": 2}, ["recompute_num_layers = 2", "the 5 layers", "5 and its divisors"]),
        ("full", 3, {"recompute_num_layers": 2}, ["the 3 and 4 layers", "1 and its divisors", "block"]),
        ("selective", 1, {"recompute_num_layers": 1}, ["`trainer.recompute` = selective", "set recompute to full"]),
    ],
)
def test_layers_that_cannot_be_recomputed_together_are_refused(
    recompute: str, pipeline: int, megatron: dict[str, object], said: list[str]
) -> None:
    keys = {"recompute": "full", "parallel": {"pipeline": pipeline}, "megatron": megatron}
    # as changes for less memory do, which are judged without being loaded
    trainer = TrainerConfig.model_validate(keys).model_copy(update={"recompute": recompute})
    (found,) = recompute_problems(SPEC, trainer)
    assert all(part in found for part in said), found


@pytest.mark.parametrize(
    ("recompute", "megatron"),
    [
        ("full", {}),
        ("full", {"recompute_num_layers": 5}),
        ("full", {"recompute_method": "block", "recompute_num_layers": 4}),
    ],
)
def test_other_layers_are_accepted(recompute: str, megatron: dict[str, object]) -> None:
    trainer = TrainerConfig.model_validate({"recompute": recompute, "megatron": megatron})
    assert recompute_problems(SPEC, trainer) == []


@pytest.mark.parametrize(
    ("megatron", "said"),
    [
        ({"recompute_num_layers": 5}, ["recompute_num_layers = 5", "the 6 layers", "; 2 and its divisors do"]),
        ({"recompute_num_layers": 2}, []),
        ({"recompute_method": "block", "recompute_num_layers": 5}, []),
    ],
)
def test_layers_of_a_critic_are_recomputed_together_too(megatron: dict[str, object], said: list[str]) -> None:
    """A number that divides the policy's 10 layers must divide the 6 of its critic."""
    trainer = {"critic": {"model": "c"}, "recompute": "full", "megatron": megatron}
    config = RunConfig.model_validate({**BASE, "algorithm": {"advantage": "gae"}, "trainer": trainer})
    assert recompute_problems(SPEC, config.trainer) == []
    found = critic_problems(config, replace(SPEC, num_layers=6), SPEC)
    assert len(found) == bool(said)
    assert all(part in found[0] for part in ["`trainer.critic.model`: ", *said] if said), found


@pytest.mark.parametrize(
    ("vllm", "said"),
    [
        (
            {"max_num_batched_tokens": 63, "enforce_eager": True},
            ["max_num_batched_tokens` = 63 with `engine.max_num_seqs` = 64", "raise it to 64 or more"],
        ),
        (
            {"max_num_batched_tokens": 64},
            ["max_num_batched_tokens` = 64 with `history.max_draft_tokens` = 64", "raise it to 65"],
        ),
        ({"enable_chunked_prefill": False}, ["of 4097 tokens, and holds 4096", "to 4097 or more"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 4097}, []),
        ({"max_num_batched_tokens": 64, "enforce_eager": True}, []),
        ({"max_num_batched_tokens": 65}, []),
    ],
)
def test_forwards_that_vllm_would_refuse_are_refused_before_engines_start(
    vllm: dict[str, object], said: list[str]
) -> None:
    """64 requests with drafts of up to 64 tokens, whose forwards hold 4096 tokens where nothing else is given."""
    engine = EngineConfig.model_validate({"vllm": vllm})
    found = forward_problems(engine, 4097, draft_tokens=64, on_gpu=True)
    assert len(found) == bool(said) and all(part in found[0] for part in said), found


def test_graphs_and_the_default_size_of_a_forward_are_judged_on_gpus_only() -> None:
    for vllm in ({"max_num_batched_tokens": 64}, {"enable_chunked_prefill": False}):
        engine = EngineConfig.model_validate({"vllm": vllm})
        assert forward_problems(engine, 4097, draft_tokens=64, on_gpu=True)
        assert forward_problems(engine, 4097, draft_tokens=64) == []


@pytest.mark.parametrize(
    ("node", "parts", "most"),
    [
        (GPU, {}, 2176),
        (GPU, {"history": {"baseline_engines": [0]}, "engine": {"num_engines": 2}}, 2048),
        (GPU, {"history": {"drafts": False}}, 2048),
        (GPU, {"engine": {"vllm": {"max_num_batched_tokens": 300}}}, 300),
        (CPU, {}, 2048),
    ],
)
def test_the_probe_fits_the_smallest_forward_of_the_engines(
    node: NodeResources, parts: dict[str, dict[str, object]], most: int
) -> None:
    """128 requests, and 2,176 tokens with drafts of up to 16."""
    engine = {"max_num_seqs": 128, **parts.get("engine", {})}
    longest = {"data": {"train": [{"path": "x"}], "max_prompt_tokens": 3000}}

    def found(probe_tokens: int) -> list[str]:
        run = {**BASE, **parts, **longest, "engine": engine, "publish": {"probe_tokens": probe_tokens}}
        problems = model_problems(RunConfig.model_validate(run), replace(SPEC, max_positions=8192), node)
        return [problem for problem in problems if "probe_tokens" in problem]

    assert found(most) == []
    (problem,) = found(most + 1)
    assert f"`publish.probe_tokens` = {most + 1}: " in problem and f"holds {most} tokens; lower it to {most}" in problem


def test_the_probe_and_a_token_after_it_fit_the_longest_sequence() -> None:
    """Prompts of 20 tokens and responses of 12: engines have room for 32."""
    data = {"train": [{"path": "x"}], "max_prompt_tokens": 20}
    run = {**BASE, "data": data, "sampling": {"max_response_tokens": 12}, "publish": {"probe_tokens": 31}}
    assert model_problems(RunConfig.model_validate(run), SPEC, CPU) == []
    (problem,) = model_problems(RunConfig.model_validate(run | {"publish": {"probe_tokens": 32}}), SPEC, CPU)
    assert "`publish.probe_tokens` = 32" in problem and "has 32 tokens; lower it below 32" in problem


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"offload": "all"}, ["`trainer.offload` = all", "set it to none"]),
        ({"critic": {"model": "nowhere"}}, ["`trainer.critic` is set", "leave it out"]),
        ({"reference": {"refresh_every": 3}}, ["`trainer.reference` is set", "leave it out"]),
        ({"max_restarts": 5}, []),
    ],
)
def test_keys_that_a_warm_start_does_not_use_are_refused(trainer: dict[str, object], said: list[str]) -> None:
    base = {"model": "m", "output_dir": "o", "data": {"path": "x", "max_tokens": 64}, "num_steps": 1}
    found = sft_problems(SftConfig.model_validate({**base, "trainer": trainer}), SPEC, GPU)
    assert len(found) == bool(said) and all(part in found[0] for part in said), found
