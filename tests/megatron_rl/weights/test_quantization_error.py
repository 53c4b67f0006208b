"""Quantisation error is summed over pieces, ranks and layers, and reported in dB and shares."""

import math

import pytest
import torch

from megatron_rl.quantization.backends import Quantizer, TorchBackend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.weights.quantization_error import CodeWatch, sampled_rows
from megatron_rl.weights.quantization_stats import QuantizationStats, code_metrics, sum_stats
from rollout.types import WeightVersion
from rollout.weights.manifest import Box

BOX = Box(start=(64, 0), shape=(64, 8))


def test_one_in_128_rows_of_a_piece_is_measured_and_at_least_one() -> None:
    assert sampled_rows(Box(start=(64, 0), shape=(300, 8))) == Box(start=(64, 0), shape=(2, 8))
    assert sampled_rows(Box(start=(3, 5), shape=(7, 2))) == Box(start=(3, 5), shape=(1, 2))


def test_signal_noise_saturation_and_change_equal_hand_computed_values() -> None:
    watch = CodeWatch()
    weight = torch.tensor([[3.0, -4.0]])
    versions = (torch.tensor([[127, -127]], dtype=torch.int8), torch.tensor([[127, 3]], dtype=torch.int8))
    for version, codes in enumerate(versions):
        watch.begin(WeightVersion(version))
        watch.add("model.layers.7.mlp.up_proj.weight", BOX, weight, codes, torch.tensor([[3.0, -3.0]]))
    (sums,) = watch.sums().values()
    assert list(watch.sums()) == [7]
    assert (sums.signal, sums.noise, sums.num_codes) == (25, 1, 2)
    assert (sums.num_saturated, sums.num_compared, sums.num_changed) == (1, 2, 1)
    assert sums.sqnr_db == pytest.approx(10 * math.log10(25))


def test_a_version_that_is_published_again_is_compared_with_the_version_before_it() -> None:
    """Also if the first attempt has ended between two pieces."""
    watch, one, other = CodeWatch(), "model.layers.0.x.weight", "model.layers.0.y.weight"

    def publish(version: int, codes: list[int], *names: str) -> QuantizationStats:
        watch.begin(WeightVersion(version))
        for name in names:
            watch.add(name, BOX, torch.ones(1, 2), torch.tensor([codes], dtype=torch.int8), torch.ones(1, 2))
        return watch.sums()[0]

    publish(0, [1, 2], one, other)
    assert publish(1, [1, 5], one).num_changed == 1
    again = publish(1, [1, 5], one, other)
    assert (again.num_codes, again.num_compared, again.num_changed) == (4, 4, 2)
    assert publish(1, [1, 5], one, other) == again
    assert publish(2, [1, 5], one, other).num_changed == 0


def test_a_non_contiguous_part_of_a_matrix_is_measured_too() -> None:
    whole = torch.arange(1.0, 25.0).view(4, 6)
    watch, other = CodeWatch(), CodeWatch()
    for one, weight in ((watch, whole[:, 2:5]), (other, whole[:, 2:5].clone())):
        one.add("model.layers.0.x.weight", BOX, weight, weight.to(torch.int8), weight + 0.5)
    assert watch.sums() == other.sums() and watch.sums()[0].noise == pytest.approx(12 * 0.25)


def test_errors_of_layers_are_summed_over_ranks() -> None:
    a, b = (
        QuantizationStats(signal=90.0, noise=1.0, num_codes=10),
        QuantizationStats(signal=10.0, noise=9.0, num_codes=30),
    )
    layers = sum_stats([{1: a}, {0: a, 1: b}])
    assert list(layers) == [0, 1] and layers[1] == QuantizationStats(signal=100.0, noise=10.0, num_codes=40)
    found = code_metrics(layers)
    assert found["publish/sqnr_db/layer_1"] == found["publish/sqnr_db_min"] == pytest.approx(10)
    assert found["publish/sqnr_db"] == pytest.approx(10 * math.log10(190 / 11))
    assert "publish/changed_share" not in found
    assert code_metrics({}) == {}


@pytest.mark.parametrize(("name", "least", "most"), [("int8", 38, 44), ("fp8_channel", 30, 33), ("fp8_block", 30, 33)])
def test_gaussian_weights_have_the_noise_of_their_format(name: str, least: float, most: float) -> None:
    """INT8 over +-4 sigma has steps of 4 / 127 sigma; e4m3 has three mantissa bits at every scale."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    format = Quantizer(format=CODE_FORMATS[name], backend=TorchBackend())
    factors = format.factors(format.amax(weight, (0, 0)))
    codes = format.codes(weight, factors, (0, 0))
    watch = CodeWatch()
    box = Box(start=(0, 0), shape=(256, 256))
    watch.add("model.layers.0.x.weight", box, weight, codes, format.values(codes, format.scales(factors), (0, 0)))
    assert least < watch.sums()[0].sqnr_db < most
