"""A rank that is placed on a device never trains on the CPU instead."""

import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model import parallel
from rollout.failures import UnusableDeviceError


@pytest.mark.parametrize(
    ("built_for", "said"), [(None, "built for CPUs"), ("13.0", "built for CUDA 13.0; use the environment")]
)
def test_a_rank_whose_device_torch_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    store = torch.distributed.HashStore()
    said_of_both = r"trainer rank 0 is placed on GPU 3, which torch .* cannot use"
    with pytest.raises(UnusableDeviceError, match=said_of_both) as error:
        parallel.initialize(ParallelConfig(), rank=0, store=store, timeout_s=1.0, seed=0, devices="3")
    assert said in str(error.value) and "driver" in str(error.value)
    assert not torch.distributed.is_initialized()
