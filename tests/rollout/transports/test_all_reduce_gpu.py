"""The sum over nodes by NCCL: one process on one device."""

import pytest
import torch

from rollout.transports.all_reduce import all_reduce
from rollout.transports.rendezvous import open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_sum_on_one_device_is_right_by_gloo_and_nccl() -> None:
    port = open_store(host="127.0.0.1", timeout_s=60.0).port  # free again: nothing holds the store
    assert all_reduce(0, 1, "127.0.0.1", port, 60.0) == "a sum over 1 node(s) is right by gloo and nccl"
