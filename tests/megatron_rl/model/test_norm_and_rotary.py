import pytest
import torch

from megatron_rl.model.rotary import positions, rotate_packed, scaled_frequencies
from megatron_rl.model.spec import RopeScaling

CU_SEQLENS = torch.tensor([0, 5, 6, 13], dtype=torch.int32)


@pytest.mark.parametrize("shape", [(13, 1, 48), (13, 1, 3, 16)])
def test_rms_norm_and_its_gradients_equal_torchs_in_fp64(ranks, shape):
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-1], generator=generator)
    (found,) = ranks.run(norm_and_gradients, x, weight, grad)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(x64, shape[-1:], weight64, 1e-6)
    expected.backward(grad.double())
    for value, wanted in zip(found, (expected.detach(), x64.grad, weight64.grad), strict=True):
        torch.testing.assert_close(torch.from_numpy(value).double(), wanted, atol=1e-5, rtol=1e-5)


def norm_and_gradients(position, parallel, x, weight, grad):
    from megatron_rl.model.norm import rms_norm

    x.requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight, eps=1e-6)
    y.backward(grad)
    return y.detach().numpy(), x.grad.numpy(), weight.grad.numpy()


def reference_rotation(heads, angles):
    """One row and one head at a time: pair (i, i + D/2) is rotated by the angle of its position."""
    out = torch.empty_like(heads)
    half = heads.shape[-1] // 2
    starts = CU_SEQLENS.tolist()
    for row in range(len(heads)):
        position = row - max(start for start in starts if start <= row)
        for head in range(heads.shape[1]):
            for i in range(half):
                a, b, angle = heads[row, head, i], heads[row, head, i + half], angles[position, i]
                out[row, head, i] = a * angle.cos() - b * angle.sin()
                out[row, head, i + half] = b * angle.cos() + a * angle.sin()
    return out


def test_packed_rotation_and_its_gradient_equal_a_loop_over_pairs():
    generator = torch.Generator().manual_seed(0)
    heads, grad = torch.randn(13, 2, 8, generator=generator), torch.randn(13, 2, 8, generator=generator)
    angles = torch.outer(torch.arange(7.0), 1.0 / 100 ** (torch.arange(4) / 4))
    freqs = torch.cat([angles, angles], dim=1)[:, None, None]
    leaf, leaf64 = heads.clone().requires_grad_(), heads.double().requires_grad_()
    found, expected = rotate_packed(leaf, CU_SEQLENS, freqs), reference_rotation(leaf64, angles.double())
    found.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(leaf.grad.double(), leaf64.grad, atol=1e-6, rtol=1e-6)


def test_bf16_heads_are_rotated_in_fp32():
    heads = torch.randn(13, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    freqs = torch.randn(7, 1, 1, 4).repeat(1, 1, 1, 2)
    found = rotate_packed(heads, CU_SEQLENS, freqs)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, rotate_packed(heads.float(), CU_SEQLENS, freqs).bfloat16())


def test_positions_restart_in_every_sequence():
    assert positions(CU_SEQLENS, 13).tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]


def test_llama3_frequencies_equal_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        hidden_size=2048,
        num_attention_heads=32,
        rope_parameters={**rope, "rope_type": "llama3", "original_max_position_embeddings": 8192},
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    unscaled = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    scaling = RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    torch.testing.assert_close(scaled_frequencies(unscaled, scaling), expected, atol=0, rtol=1e-5)
