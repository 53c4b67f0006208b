"""FP8 parameters are published unchanged where blocks agree; elsewhere their decoded values are quantised."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config import ParallelConfig
from megatron_rl.quantization import fp8_parameters
from megatron_rl.quantization.backends import Quantizer, TorchBackend
from megatron_rl.quantization.formats import CODE_FORMATS
from megatron_rl.weights import packer
from megatron_rl.weights.fp8_passthrough import blocks_agree, parameter_shapes
from megatron_rl.weights.packer import WeightPacker
from megatron_rl.weights.quantization_stats import code_metrics
from megatron_rl.weights.reshard_plan import plan_reshard
from megatron_rl.weights.shards import Kind, rank_shards
from rollout.types import WeightVersion
from rollout.weights.format import LAYOUTS, WeightFormat
from rollout.weights.manifest import DTYPE_BYTES, Box
from tests.support.model_specs import qwen_spec
from tests.support.trainers.fake_fp8_parameter import FakeFp8Parameter
from tests.support.trainers.memory_sender import MemorySender

SPEC = qwen_spec(
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    ffn_size=192,
    vocab_size=150,
    tied=True,
    max_positions=64,
)
"""Of every matrix but gate and up (and rows of down) the blocks agree: 192 is one and a half."""

TORCH = {"bfloat16": torch.bfloat16, "int8": torch.int8, "float32": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}


class Published:
    """One trainer rank whose last layer is BF16, and its sent bytes."""

    def __init__(self, format, bucket_bytes=20_000):
        parallel = ParallelConfig()
        self.plan = plan_reshard(
            SPEC, parallel, format=WeightFormat(name=format), bucket_bytes=bucket_bytes, uses_te_layer_names=True
        )
        self.held = rank_shards(SPEC, parallel, tensor_rank=0, pipeline_rank=0, uses_te_layer_names=True)
        torch.manual_seed(0)
        weights = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in parameter_shapes(self.held).items()}
        fp8 = {one.megatron_name for one in self.held if one.kind is Kind.LINEAR and ".layers.0." in one.megatron_name}
        self.parameters = {
            name: FakeFp8Parameter(weight) if name in fp8 else torch.nn.Parameter(weight)
            for name, weight in weights.items()
        }
        self.packer = WeightPacker(
            self.plan,
            rank=0,
            held=self.held,
            parameters=self.parameters,
            tensor_group=None,
            fingerprints=lambda _: True,
        )

    def send(self, version=1):
        sender = MemorySender()
        self.packer.refresh_scales()
        self.packer.send(sender, WeightVersion(version))
        return self.assembled(sender)

    def assembled(self, sender):
        whole = {one.name: torch.zeros(one.shape, dtype=TORCH[one.dtype]) for one in self.plan.tensors}
        for bucket in self.plan.buckets:
            for piece in bucket.pieces:
                tensor = self.plan.tensors[piece.tensor]
                size = piece.box.size * DTYPE_BYTES[tensor.dtype]
                data = sender.buckets[bucket.index][piece.offset : piece.offset + size]
                box = data.clone().view(TORCH[tensor.dtype]).view(piece.shape)
                whole[tensor.name].view(torch.uint8 if box.element_size() == 1 else box.dtype)[
                    piece.box.slices((0,) * len(piece.shape))
                ] = box.view(torch.uint8) if box.element_size() == 1 else box
        return whole


def linears(published):
    """Shard, parameter and block agreement of every FP8 box."""
    for one in published.held:
        parameter = published.parameters[one.megatron_name]
        if fp8_parameters.is_fp8_parameter(parameter):
            yield one, parameter, blocks_agree(one, tuple(parameter.shape))


@pytest.mark.parametrize("bucket_bytes", [3_000, 1 << 20])
def test_sent_codes_and_scales_are_the_parameters_where_blocks_agree(bucket_bytes):
    published = Published("fp8_block", bucket_bytes)
    sent = published.send()
    agreed = {}
    for one, parameter, agrees in linears(published):
        agreed[one.hf_name.split(".")[-2]] = agrees
        codes, scales = sent[one.hf_name][one.hf_slices], sent[one.hf_name + "_scale_inv"]
        touched = LAYOUTS["fp8_block"].touched(one.hf_start, one.shape)
        if agrees:
            own = fp8_parameters.Blocks.of(parameter)
            assert torch.equal(codes.view(torch.uint8), parameter._rowwise_data[one.megatron_slices]), one.hf_name
            assert torch.equal(scales[touched], own.scales(one.megatron_slices)), one.hf_name
        else:
            weight = fp8_parameters.values(parameter, one.megatron_slices)
            format = Quantizer(format=CODE_FORMATS["fp8_block"], backend=TorchBackend())
            factors = format.factors(format.amax(weight, (0, 0)))
            assert torch.equal(codes.view(torch.uint8), format.codes(weight, factors, (0, 0)).view(torch.uint8))
            assert torch.equal(scales[touched], format.scales(factors))
    alike = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), True)
    assert agreed == alike | {"gate_proj": False, "up_proj": False}


@pytest.mark.parametrize("name", ["int8", "fp8_channel"])
def test_other_formats_quantise_the_parameters_decoded_values(name):
    published = Published(name)
    sent, format = published.send(), Quantizer(format=CODE_FORMATS[name], backend=TorchBackend())
    for matrix in {one.hf_name for one, _, _ in linears(published)}:
        boxes = [(one, parameter) for one, parameter, _ in linears(published) if one.hf_name == matrix]
        whole = torch.zeros(boxes[0][0].hf_full_shape, dtype=torch.bfloat16)
        for one, parameter in boxes:
            whole[one.hf_slices] = fp8_parameters.values(parameter, one.megatron_slices)
        factors = format.factors(format.amax(whole, (0, 0)))
        expected = format.codes(whole, factors, (0, 0))
        assert torch.equal(sent[matrix].view(torch.uint8), expected.view(torch.uint8)), matrix
        assert torch.equal(sent[matrix + "_scale"], format.scales(factors)), matrix


def test_bf16_sends_the_parameters_decoded_values():
    published = Published("bf16")
    sent = published.send()
    for one, parameter, _ in linears(published):
        assert torch.equal(sent[one.hf_name][one.hf_slices], fp8_parameters.values(parameter, one.megatron_slices))


@pytest.mark.slow
@pytest.mark.parametrize("size", [5000, 1 << 20])
@pytest.mark.parametrize("format", ["fp8_block", "int8", "bf16"])
def test_published_values_and_fingerprints_are_those_of_the_sent_bytes(monkeypatch, format, size):
    published = Published(format)
    sent = published.send()
    sums = published.packer.published_fingerprint()
    monkeypatch.setattr(packer, "CPU_BOX_SIZE", size)
    assert all((published.send()[name] == sent[name]).all() for name in sent)
    again = published.packer.published_fingerprint()
    assert sums.keys() == again.keys()
    assert all(again[name] == pytest.approx(sums[name], rel=1e-4, abs=1e-3) for name in sums)
    for one, parameter, agrees in linears(published):
        values = published.packer.published_values(one.megatron_name)
        assert values.shape == parameter.shape and values.dtype == torch.bfloat16
        found = values[one.megatron_slices]
        if format == "bf16":
            assert torch.equal(found, sent[one.hf_name][one.hf_slices])
        elif format == "fp8_block" and agrees:
            assert torch.equal(found, fp8_parameters.values(parameter, one.megatron_slices))


def test_passed_through_and_requantised_bytes_are_counted():
    published = Published("fp8_block")
    published.send()
    metrics = code_metrics(published.packer.watch.sums())
    assert 0.5 < metrics["publish/as_is_share"] < 1
    sums = published.packer.watch.sums()
    assert sums[0].num_as_is + sums[0].num_requantised == sums[0].num_codes
    assert sums[1].num_as_is == sums[1].num_requantised == 0 < sums[1].num_codes
    other = Published("int8")
    other.send()
    assert code_metrics(other.packer.watch.sums())["publish/as_is_share"] == 0


def test_a_repeated_publish_reports_the_codes_that_changed_since_the_version_before_it():
    published = Published("int8")
    published.send(0)
    for parameter in published.parameters.values():
        if not fp8_parameters.is_fp8_parameter(parameter):
            parameter.data.neg_()
    published.send(1)
    first = published.packer.watch.sums()
    assert first[0].num_changed == 0 < first[1].num_changed <= first[1].num_compared == first[1].num_codes
    published.send(1)
    assert published.packer.watch.sums() == first


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8_block"])
def test_the_bytes_of_a_later_publish_are_those_of_a_fresh_packer_with_the_same_weights(format):
    """Every row grows or shrinks by a factor of its own, so that scales of the publish before fit no row."""
    published, fresh = Published(format), Published(format)
    published.send(0)
    for both in (published, fresh):
        rescale(both)
    again, expected = published.send(1), fresh.send(1)
    assert again.keys() == expected.keys()
    for name in expected:
        assert torch.equal(again[name].view(torch.uint8), expected[name].view(torch.uint8)), name


def rescale(published):
    """Multiply every row of the parameters by a factor between 0.3 and 3, in place."""
    torch.manual_seed(1)
    for parameter in published.parameters.values():
        factors = torch.empty(parameter.shape[0], *[1] * (len(parameter.shape) - 1)).uniform_(0.3, 3)
        if fp8_parameters.is_fp8_parameter(parameter):
            everything = tuple(slice(0, size) for size in parameter.shape)
            parameter.quantize_((fp8_parameters.values(parameter, everything) * factors).to(parameter.dtype))
        else:
            parameter.data.mul_(factors)


def test_a_nan_code_stops_the_publish_naming_the_tensor():
    published = Published("fp8_block")
    published.parameters["decoder.layers.0.self_attention.linear_proj.weight"]._rowwise_data[0, 0] = 0x7F
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.o_proj\.weight: 1 FP8 codes .* diverged"):
        published.send()


@pytest.mark.parametrize("format", ["int8", "fp8_channel", "fp8_block"])
def test_a_nan_weight_stops_the_publish_before_any_byte_of_its_matrix_is_sent(format):
    class Recording(MemorySender):
        committed: list[int] = []

        def commit(self, index):
            self.committed.append(index)

    published, sender = Published(format, bucket_bytes=3_000), Recording()
    published.parameters["decoder.layers.1.self_attention.linear_proj.weight"].data[200, 3] = torch.nan
    name = "model.layers.1.self_attn.o_proj.weight"
    published.packer.refresh_scales()
    with pytest.raises(ValueError, match=rf"{name}: \d+ of \d+ scales .* diverged".replace(".weight", r"\.weight")):
        published.packer.send(sender, WeightVersion(1))
    left = {published.plan.tensors[piece.tensor].name for one in published.plan.buckets for piece in one.pieces}
    gone = {
        published.plan.tensors[piece.tensor].name
        for bucket in published.plan.buckets
        for piece in bucket.pieces
        if bucket.index in sender.committed
    }
    assert gone and name in left and not gone & {name, name + "_scale", name + "_scale_inv"}


@given(
    start=st.integers(0, 300),
    height=st.integers(0, 400),
    columns=st.integers(1, 50),
    most=st.integers(1, 5000),
    multiple=st.sampled_from([1, 128]),
)
def test_row_boxes_tile_a_box_and_cut_no_block(start, height, columns, most, multiple):
    box = Box(start=(start, 7), shape=(height, columns))
    found = list(packer.row_boxes(box, most=most, multiple=multiple))
    end = start
    for row_box in found:
        assert row_box.start == (end, 7) and row_box.shape[1] == columns and row_box.shape[0] > 0
        assert row_box.size <= max(most, multiple * columns)
        end += row_box.shape[0]
        assert end % multiple == 0 or end == start + height
    assert end == start + height
