"""Settings of sampling that would make trainer and sampler differ, and values that no engine can have."""

import pytest
from pydantic import ValidationError

from rollout.config import EngineConfig, SamplingConfig


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.005, 0.00999])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature: float) -> None:
    with pytest.raises(ValidationError, match=r"temperature\n.*greater than or equal to 0\.01"):
        SamplingConfig(temperature=temperature)
    assert SamplingConfig(temperature=0.01).temperature == 0.01


@pytest.mark.parametrize("value", ["8k", "8192", 8192.0, True, 0, -1])
def test_tokens_of_a_forward_that_are_no_count_are_refused_at_load(value: str | float) -> None:
    with pytest.raises(ValidationError, match=r"vllm\n.*`max_num_batched_tokens` = .* not a whole number above 0"):
        EngineConfig(vllm={"max_num_batched_tokens": value})
    assert EngineConfig(vllm={"max_num_batched_tokens": 8192}).forward_tokens(16) == 8192


@pytest.mark.parametrize("gap", [0.0, -0.1])
def test_a_bound_of_the_probe_that_no_publish_can_meet_is_refused(gap: float) -> None:
    with pytest.raises(ValidationError, match=r"probe_max_logprob_gap\.int8\n.*greater than 0"):
        EngineConfig(probe_max_logprob_gap={"int8": gap})
    assert EngineConfig(probe_max_logprob_gap={"int8": 0.3}, format="int8").max_probe_gap == 0.3
