"""The sum over nodes by NCCL: one process on one device."""

import pytest
import torch

from rollout.transports.all_reduce import all_reduce
from rollout.transports.store_server import listen

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_sum_on_one_device_is_right_by_gloo_and_nccl() -> None:
    with listen("127.0.0.1") as listening:
        port = listening.getsockname()[1]
    assert all_reduce(0, 1, "127.0.0.1", port, 60.0) == "a sum over 1 node(s) is right by gloo and nccl"
