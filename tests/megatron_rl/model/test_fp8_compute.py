"""FP8 settings of Megatron, and a model that switches FP8 off for a while and releases its FP8 copies."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.trainers.fake_fp8_parameter import FakeFp8Parameter


def compute(position, parallel):
    from megatron_rl.model import fp8_compute as found

    assert found.config_fields("none") == {}
    assert found.config_fields("blockwise") == {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False}
    assert found.config_fields("blockwise_param")["fp8_param"] is True
    rows = {
        (fp8, tensor): found.row_multiple(fp8, tensor=tensor)
        for fp8 in ("none", "blockwise_param")
        for tensor in (1, 4)
    }
    assert rows == {
        ("none", 1): 16,
        ("none", 4): 64,
        ("blockwise_param", 1): 16,
        ("blockwise_param", 4): 512,
    }

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.config = SimpleNamespace(fp8="e4m3")
    with found.without_fp8([model]):
        assert model.config.fp8 is None
    with pytest.raises(KeyError), found.without_fp8([model]):
        raise KeyError
    assert model.config.fp8 == "e4m3"

    model[0]._fp8_workspaces = {"weight": FakeFp8Parameter(torch.ones(128, 128, dtype=torch.bfloat16))}
    assert found.drop_copies(model) == 2 * 128 * 128 + 2 * 4 * 4
    assert found.drop_copies(model) == 0 and model[0]._fp8_workspaces == {}

    found.check_parameters(model, "blockwise")
    with pytest.raises(RuntimeError, match="built 0 FP8 parameters"):
        found.check_parameters(model, "blockwise_param")
    return True


def test_megatrons_fp8_settings_and_switching_fp8_off(ranks):
    assert ranks.run(compute) == [True]
