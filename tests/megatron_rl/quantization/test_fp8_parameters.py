"""FP8 parameters are read box by box from codes and scales, written as a whole, and moved with their attributes."""

import pytest
import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.model.spec import read_model_spec
from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.fp8 import block_amax, fp8_block_codes, fp8_block_values, fp8_scale
from megatron_rl.weights.fp8_passthrough import parameter_shapes
from megatron_rl.weights.hf_load import load
from megatron_rl.weights.shards import Kind, rank_shards
from tests.support.trainers.fake_fp8_parameter import FakeFp8Parameter
from tests.support.trainers.tiny_megatron_models import save_model

SHAPES = [(128, 128), (256, 640), (200, 300)]


def weight_of(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * torch.logspace(-6, 2, shape[1])).to(torch.bfloat16)


def requantised(weight):
    scale = fp8_scale(block_amax(weight), power_of_two=True, dtype=torch.bfloat16)
    return fp8_block_values(fp8_block_codes(weight, scale), 1.0 / scale).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_box_equals_that_part_of_the_whole_and_padding_of_scales_is_never_read(shape):
    weight = weight_of(shape)
    parameter = FakeFp8Parameter(weight)
    whole = fp8_parameters.decoded(parameter)
    assert torch.equal(whole, requantised(weight)) and whole.dtype == torch.bfloat16
    for box in [
        (slice(0, 1), slice(0, 1)),
        (slice(5, 140), slice(127, 129)),
        (slice(128, shape[0]), slice(0, shape[1])),
    ]:
        box = tuple(slice(min(one.start, size), min(one.stop, size)) for one, size in zip(box, shape, strict=True))
        assert torch.equal(fp8_parameters.values(parameter, box), whole[box])


def test_a_plain_parameter_is_read_as_it_is():
    parameter = torch.nn.Parameter(torch.randn(8, 8))
    assert torch.equal(fp8_parameters.values(parameter, (slice(2, 4), slice(1, 8))), parameter.detach()[2:4, 1:8])
    assert not fp8_parameters.is_fp8_parameter(parameter) and fp8_parameters.is_fp8_parameter(
        FakeFp8Parameter(weight_of((128, 128)))
    )
    (held,) = fp8_parameters.buffers(parameter)
    assert held.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


@pytest.mark.parametrize("largest", [448.0, 300.0, 225.0, 224.5, 3e-5])
def test_quantising_decoded_values_changes_no_value(largest):
    """As in a checkpoint; 225 is rounded to 224, which gets the next scale."""
    weight = weight_of((256, 256), seed=3)
    weight[:128, :128] *= largest / weight[:128, :128].abs().max()
    weight[0, 0] = largest
    once = requantised(weight)
    assert torch.equal(requantised(once), once)


def test_nan_codes_are_refused():
    parameter = FakeFp8Parameter(weight_of((256, 256)))
    blocks = fp8_parameters.Blocks.of(parameter)
    everything = (slice(0, 256), slice(0, 256))
    blocks.check(everything)
    parameter._rowwise_data[3, 200] = 0xFF
    with pytest.raises(ValueError, match="1 FP8 codes and scales"):
        blocks.check(everything)
    blocks.check((slice(128, 256), slice(0, 256)))


def test_scales_of_another_layout_are_refused():
    parameter = FakeFp8Parameter(weight_of((256, 256)))
    parameter._rowwise_scale_inv = torch.ones(2, 1)
    with pytest.raises(RuntimeError, match=r"\(2, 1\) do not belong to codes \(256, 256\)"):
        fp8_parameters.Blocks.of(parameter)
    parameter._is_2D_scaled = False
    with pytest.raises(RuntimeError, match="no row-wise codes with a scale for each 128 x 128"):
        fp8_parameters.Blocks.of(parameter)


def test_initial_weights_are_quantised_and_kept_for_the_masters():
    parameter, weight = FakeFp8Parameter(torch.zeros(256, 256, dtype=torch.bfloat16)), weight_of((256, 256))
    fp8_parameters.fill(parameter, weight)
    assert parameter.get_high_precision_init_val() is weight
    assert torch.equal(fp8_parameters.decoded(parameter), requantised(weight))
    fp8_parameters.forget_first_weights([torch.nn.Parameter(weight), parameter])
    assert parameter.get_high_precision_init_val() is None


def test_scales_that_are_not_powers_of_two_are_refused_naming_the_environment_variable():
    parameter = FakeFp8Parameter(weight_of((128, 128)))
    parameter._quantizer.force_pow_2_scales = False
    with pytest.raises(ValueError, match="NVTE_FP8_BLOCK_SCALING_FP32_SCALES = 1"):
        fp8_parameters.fill(parameter, weight_of((128, 128)))


def test_all_tensors_of_a_parameter_are_listed_for_moving():
    parameter = FakeFp8Parameter(weight_of((256, 128)))
    assert sum(part.nbytes for part in fp8_parameters.buffers(parameter)) == 2 * 256 * 128 + 4 * (2 * 4 + 1 * 4)
    parameter._columnwise_data = parameter._columnwise_scale_inv = None
    assert len(list(fp8_parameters.buffers(parameter))) == 2


class FakeModel:
    """Parameters by name; matrices are FP8."""

    def __init__(self, held):
        matrices = {one.megatron_name for one in held if one.kind is Kind.LINEAR}
        self.parameters = {
            name: FakeFp8Parameter(torch.ones(shape, dtype=torch.bfloat16))
            if name in matrices
            else torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
            for name, shape in parameter_shapes(held).items()
        }

    def named_parameters(self):
        return self.parameters.items()


def test_loading_writes_fp8_parameters_as_a_whole_and_others_in_place(tmp_path):
    spec = read_model_spec(save_model("wide", tmp_path, dtype=torch.float32))
    for rank in range(2):
        held = rank_shards(spec, ParallelConfig(tensor=2), tensor_rank=rank, pipeline_rank=0, uses_te_layer_names=True)
        model = FakeModel(held)
        load(model, held, spec, tmp_path)
        from safetensors.torch import load_file

        files = load_file(tmp_path / "model.safetensors")
        for one in held:
            box, parameter = files[one.hf_name][one.hf_slices].to(torch.bfloat16), model.parameters[one.megatron_name]
            if fp8_parameters.is_fp8_parameter(parameter):
                assert torch.equal(parameter.get_high_precision_init_val()[one.megatron_slices], box), one
                expected = requantised(parameter.get_high_precision_init_val())[one.megatron_slices]
                assert torch.equal(fp8_parameters.values(parameter, one.megatron_slices), expected), one
            else:
                assert torch.equal(parameter[one.megatron_slices], box), one
