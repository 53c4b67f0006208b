"""Outputs of single experts, by a method that asks for as many experts for a token as the model has."""

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from rollout.weights.fingerprint import expert_inputs
from rollout.worker.loaded_fingerprint import _through_experts

EXPERTS, PER_TOKEN, HIDDEN = 5, 3, 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w2_weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))
        self.local_num_experts, self.top_k = EXPERTS, PER_TOKEN
        self.quant_method = object.__new__(Method)


class Method(FusedMoEMethodBase):
    """Adds the weighted outputs of each token's experts, whose one matrix is `w2_weight`."""

    is_monolithic, topk_indices_dtype = False, torch.int64

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        assert topk_ids.shape == topk_weights.shape == (len(x), PER_TOKEN)
        assert all(len(set(row)) == PER_TOKEN for row in topk_ids.tolist()), "an expert twice"
        outputs = torch.einsum("th,eoh->teo", x, layer.w2_weight)
        chosen = outputs.gather(1, topk_ids[:, :, None].expand(-1, -1, HIDDEN))
        return (chosen * topk_weights[:, :, None]).sum(1)


Method.__abstractmethods__ = frozenset()


def test_each_expert_alone_makes_its_outputs() -> None:
    torch.manual_seed(0)
    layer = Layer()
    found = _through_experts(layer, HIDDEN, torch.float32)
    expected = torch.stack([expert_inputs(HIDDEN).float() @ matrix.T for matrix in layer.w2_weight])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
