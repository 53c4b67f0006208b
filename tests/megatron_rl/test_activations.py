"""Estimates of activations and attention scores against what torch holds."""

import weakref
from dataclasses import replace

import pytest

from megatron_rl.activations import activation_bytes, most_pairs, score_bytes
from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.model.spec import Experts
from tests.support.model_specs import qwen_spec

DENSE = qwen_spec(
    num_layers=4, hidden_size=160, num_heads=8, num_kv_heads=1, head_dim=32, ffn_size=800, max_positions=128
)
"""Ratios of Qwen3-32B, a thirty-second of its widths."""
SPECS = {
    "qwen3": DENSE,
    "qwen2": replace(DENSE, family="qwen2", qk_norm=False, qkv_bias=True),
    "many key heads": replace(DENSE, num_kv_heads=8),
    "experts": replace(
        DENSE, family="qwen3_moe", ffn_size=192, experts=Experts(count=4, per_token=2, ffn_size=192, normalised=True)
    ),
}
TOKENS = 32
FUSED = {"bias_activation_fusion": True}


CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("none", {}),
    ("none", FUSED),
    ("full", {}),
    ("full", {"recompute_num_layers": 2}),
    ("full", {"recompute_method": "block"}),
    ("full", {"recompute_method": "block", "recompute_num_layers": 3, **FUSED}),
    ("full", {"recompute_method": "block", "recompute_num_layers": 9}),
)
"""Values of `trainer.recompute` and `trainer.megatron`."""


def all_saved_bytes(position, parallel, spec):
    """`most_saved_bytes` of each case."""
    return [most_saved_bytes(position, parallel, spec, *case) for case in CASES]


def most_saved_bytes(position, parallel, spec, recompute, megatron):
    """Most bytes of all storages that autograd keeps at one time of a forward and backward pass."""
    import numpy as np
    import torch

    from megatron_rl.model.build import ModelOptions, build
    from megatron_rl.model.packed_batch import pack_batch

    options = ModelOptions(dtype="bf16", recompute=recompute, random_weights=True, megatron=megatron)
    (model,) = build(spec, parallel, position, options)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    holders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    most = 0

    class Saved:
        def __init__(self, tensor):
            nonlocal most
            self.tensor, self.key = tensor, tensor.untyped_storage().data_ptr()
            if self.key not in own:
                holders[self.key] = holders.get(self.key, 0) + 1
                sizes[self.key] = tensor.untyped_storage().nbytes()
                most = max(most, sum(sizes.values()))

        def __del__(self):
            if self.key not in own:
                holders[self.key] -= 1
                if not holders[self.key]:
                    sizes.pop(self.key)

    ids = np.arange(TOKENS, dtype=np.int32) % 100
    batch = pack_batch([(ids[:1], ids[1:])], multiple_of=parallel.tensor)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        model.hidden(batch).sum().backward()
    return most


@pytest.mark.parametrize("name", SPECS)
def test_activations_are_those_that_autograd_keeps_on_a_cpu(ranks, name: str) -> None:
    spec = SPECS[name]
    (kept,) = ranks.run(all_saved_bytes, spec)
    for (recompute, megatron), num_bytes in zip(CASES, kept, strict=True):
        trainer = TrainerConfig.model_validate({"recompute": recompute, "megatron": megatron})
        planned = activation_bytes(spec, trainer, pipeline_rank=0, tokens=TOKENS, kernels="local")
        assert planned == pytest.approx(num_bytes, rel=0.1), (recompute, megatron)


@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_ranks_keep_the_routed_inputs_of_experts_whole(ranks, tensor: int) -> None:
    """Autograd does not keep the gathered inputs of one product: a backward pass gathers them again."""
    spec = replace(SPECS["experts"], num_kv_heads=4, hidden_size=640)
    kept = ranks.run(all_saved_bytes, spec, parallel=ParallelConfig(tensor=tensor))
    for (recompute, megatron), of_ranks in zip(CASES, zip(*kept, strict=True), strict=True):
        keys = {"recompute": recompute, "megatron": megatron, "parallel": {"tensor": tensor}}
        trainer = TrainerConfig.model_validate(keys)
        planned = activation_bytes(spec, trainer, pipeline_rank=0, tokens=TOKENS, kernels="local")
        gathered = TOKENS * 2 * 2 * spec.hidden_size
        assert planned - gathered == pytest.approx(max(of_ranks), rel=0.1), (recompute, megatron)


def unfused_attention(query, key, value):
    """The operations of Transformer Engine 2.12.0's `UnfusedDotProductAttention` and `FusedScaleMaskSoftmax` (torch's
    softmax), from query, key and value [heads, positions, size].
    """
    import torch

    num_positions = query.shape[1]
    scores = torch.empty(len(query), num_positions, num_positions, dtype=query.dtype)
    mask = torch.ones(num_positions, num_positions, dtype=torch.bool).triu(1)
    scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=0.1)

    def softmax(scores):
        scores = scores.float()
        return torch.softmax(scores.masked_fill_(mask, -10000.0), dim=-1).to(query.dtype)

    probabilities = softmax(scores)
    probabilities = probabilities.masked_fill(mask, 0)
    return torch.bmm(probabilities, value)


def bytes_of_scores(dtype_name: str, num_layers: int) -> float:
    """Most bytes of a score at one time, while attention of so many layers runs forward and backward."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    heads, positions = 2, 128
    least = heads * positions**2  # bytes: less than a tensor of scores or of a mask for each head
    sizes: dict[int, int] = {}
    most = 0

    class Live(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            found = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > least:
                    storage = tensor.untyped_storage()
                    if storage._cdata not in sizes:
                        sizes[storage._cdata] = storage.nbytes()
                        weakref.finalize(storage, sizes.pop, storage._cdata)
            most = max(most, sum(sizes.values()))
            return found

    values = torch.randn(heads, positions, 4, dtype=getattr(torch, dtype_name), requires_grad=True)
    with Live():
        hidden = values
        for _ in range(num_layers):
            hidden = unfused_attention(hidden, hidden, hidden)
        hidden.sum().backward()
    return most / (heads * positions**2)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_scores_of_unfused_attention_are_those_of_its_operations(dtype: str, torch_dtype: str, num_layers: int) -> None:
    spec = replace(DENSE, num_layers=num_layers)
    trainer = TrainerConfig.model_validate({"dtype": dtype, "max_micro_batch_tokens": 1})
    planned = score_bytes(spec, trainer, pipeline_rank=0, longest_sample=100) / (spec.num_heads * 100**2)
    assert planned == bytes_of_scores(torch_dtype, num_layers)


def test_scores_exist_in_the_layers_that_are_whole_at_one_time() -> None:
    def layers(recompute: str, **megatron: object) -> float:
        """Layers that keep probabilities beside the running one; of four."""
        trainer = TrainerConfig.model_validate({"recompute": recompute, "megatron": megatron})
        num_bytes = score_bytes(DENSE, trainer, pipeline_rank=0, longest_sample=100)
        return (num_bytes / (DENSE.num_heads * most_pairs(trainer, 100)) - 12) / 6

    assert layers("none") == 3
    assert layers("selective") == layers("full") == 0
    assert layers("full", recompute_num_layers=2) == 1
    assert layers("full", recompute_method="block") == 2
    assert layers("full", recompute_method="block", recompute_num_layers=4) == 0


def test_pairs_of_unfused_attention_are_sequences_times_the_longest_one_squared() -> None:
    def pairs(tokens: int, tensor: int = 1) -> int:
        trainer = TrainerConfig.model_validate({"max_micro_batch_tokens": tokens, "parallel": {"tensor": tensor}})
        return most_pairs(trainer, 100)

    assert pairs(50) == 100**2, "a longer sample is alone"
    assert pairs(50, tensor=2) == 2 * 100**2, "the padding is a sequence"
    assert pairs(100) == 2 * 100**2
    assert pairs(130) == 3 * 100**2, "one of 100, one of 25 and one of 5 tokens"
    assert pairs(1000) == (2 + 36) * 100**2
