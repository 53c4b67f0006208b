"""Settings of sampling that would make trainer and sampler differ."""

import pytest
from pydantic import ValidationError

from rollout.config import SamplingConfig


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.005, 0.00999])
def test_a_temperature_that_vllm_would_raise_is_refused(temperature: float) -> None:
    with pytest.raises(ValidationError, match=r"temperature\n.*greater than or equal to 0\.01"):
        SamplingConfig(temperature=temperature)
    assert SamplingConfig(temperature=0.01).temperature == 0.01
