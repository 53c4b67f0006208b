"""The bytes of a trainer rank's state against the tensors that Megatron allocates on CPUs."""

from dataclasses import replace

import pytest

from megatron_rl.config import CriticConfig, CriticOptimizerConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from megatron_rl.model.spec import Experts, read_model_spec
from megatron_rl.weights.state_sizes import critic_state, rank_state, stage_parameters
from tests.support.model_specs import qwen_spec
from tests.support.trainers.tiny_megatron_models import config_of


def allocated(position, parallel, directory, trainer, *, is_critic=False):
    """Bytes of parameters, gradient buffers and optimizer states of this rank after one update."""
    import torch

    from megatron_rl.model.build import ModelOptions, build
    from megatron_rl.model.value_model import build_value
    from megatron_rl.trainer.optimizer import build_optimizer, wrap

    models = (build_value if is_critic else build)(
        read_model_spec(directory), parallel, position, ModelOptions(dtype=trainer.dtype, random_weights=True)
    )
    chunks = wrap(models, distributed_optimizer=trainer.optimizer.distributed)
    dtype = torch.bfloat16 if trainer.dtype == "bf16" else torch.float32
    optimizer = build_optimizer(trainer.optimizer, chunks, params_dtype=dtype)
    optimizer.step()
    weights = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for chunk in chunks
        for tensor in chunk.parameters()
    }
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    states: dict[int, int] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        tensors = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        tensors += [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        states |= {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in tensors
            if tensor.untyped_storage().data_ptr() not in weights
        }
    return sum(weights.values()), sum(buffer.grad_data.nbytes for buffer in buffers), sorted(states.values())


def allocated_critic(position, parallel, directory, trainer):
    return allocated(position, parallel, directory, trainer, is_critic=True)


PARTITIONS = {
    "qwen3": [ParallelConfig(tensor=2, data=2), ParallelConfig(pipeline=2, data=2), ParallelConfig(data=3)],
    "qwen2_tied": [ParallelConfig(pipeline=2, data=2), ParallelConfig(data=2)],
    "qwen3_moe": [ParallelConfig(data=4, expert=2), ParallelConfig(pipeline=2, data=2, expert=2), ParallelConfig()],
}


@pytest.mark.parametrize(
    ("model", "dtype", "distributed"),
    [
        *((model, "bf16", True) for model in PARTITIONS),
        *((model, "fp32", False) for model in PARTITIONS),
        ("qwen3_moe", "bf16", False),
        ("qwen3_moe", "fp32", True),
    ],
)
def test_the_state_of_every_rank_has_the_bytes_of_its_tensors(ranks, tmp_path, model, dtype, distributed) -> None:
    config_of(model).save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    for parallel in PARTITIONS[model]:
        trainer = TrainerConfig(
            parallel=parallel, dtype=dtype, optimizer=OptimizerConfig(learning_rate=1e-3, distributed=distributed)
        )
        outcomes = ranks.run(allocated, tmp_path, trainer, parallel=parallel)
        for rank, (parameters, gradients, optimizer) in enumerate(outcomes):
            expected = rank_state(
                spec,
                trainer,
                pipeline_rank=rank // (parallel.tensor * parallel.data),
                data_rank=rank // parallel.tensor % parallel.data,
            )
            assert (parameters, gradients) == (expected.parameters, expected.gradients), (parallel, rank)
            assert optimizer == sorted(expected.optimizer), (parallel, rank)
            assert sum(expected.weight_storages) == expected.parameters


@pytest.mark.parametrize(("model", "distributed"), [("qwen2_tied", True), ("qwen3", False)])
def test_sizes_of_a_critic_are_those_of_its_tensors(ranks, tmp_path, model, distributed):
    config_of(model).save_pretrained(tmp_path)
    spec, parallel = read_model_spec(tmp_path), PARTITIONS[model][0]
    optimizer = CriticOptimizerConfig(learning_rate=1e-3, distributed=distributed)
    trainer = TrainerConfig(parallel=parallel, optimizer=optimizer, critic=CriticConfig(optimizer=optimizer))
    for rank, found in enumerate(ranks.run(allocated_critic, tmp_path, trainer, parallel=parallel)):
        expected = critic_state(
            spec,
            trainer,
            pipeline_rank=rank // (parallel.tensor * parallel.data),
            data_rank=rank // parallel.tensor % parallel.data,
        )
        assert found == (expected.parameters, expected.gradients, sorted(expected.optimizer)), rank


def test_ranks_together_update_every_element_once() -> None:
    spec = qwen_spec(experts=Experts(count=6, per_token=2, ffn_size=48, normalised=True), ffn_size=48)
    parallel = ParallelConfig(data=6, expert=3)
    trainer = TrainerConfig(parallel=parallel, optimizer=OptimizerConfig(distributed=True))
    parts = [rank_state(spec, trainer, pipeline_rank=0, data_rank=rank) for rank in range(parallel.data)]
    held = stage_parameters(spec, parallel, 0)
    experts = sum(item.size for item in held if item.of_expert)
    dense = sum(item.size for item in held if not item.of_expert)
    assert sum(part.optimizer_bytes for part in parts) == 12 * (dense + parallel.expert * experts)
    unaligned = sum(63 for item in held if item.size % 64)
    assert max(part.optimizer_bytes for part in parts) <= parts[0].optimizer_bytes + 12 * unaligned


def test_spreading_experts_spreads_their_state() -> None:
    spec = qwen_spec(experts=Experts(count=8, per_token=2, ffn_size=64, normalised=True), ffn_size=64)
    whole = rank_state(spec, TrainerConfig(parallel=ParallelConfig(data=4)), pipeline_rank=0)
    spread = rank_state(spec, TrainerConfig(parallel=ParallelConfig(data=4, expert=4)), pipeline_rank=0)
    experts = 8 * 3 * spec.hidden_size * spec.ffn_size * spec.num_layers
    assert whole.parameters - spread.parameters == 2 * experts * 3 // 4
    assert whole.gradients - spread.gradients == 4 * experts * 3 // 4


def test_fp8_parameters_replace_bf16_and_fp8_copies_come_on_top() -> None:
    spec = replace(qwen_spec(), hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=512)
    linear = spec.num_layers * (4 * 256 * 256 + 3 * 256 * 512)
    scales = 2 * 4 * linear // (128 * 128)

    def parameters(fp8: str) -> int:
        trainer = TrainerConfig.model_validate({"fp8": fp8, "optimizer": {"distributed": True}})
        return rank_state(spec, trainer, pipeline_rank=0).parameters

    assert parameters("blockwise") == parameters("none") + 2 * linear + scales
    assert abs(parameters("blockwise_param") - parameters("none") - scales) < 1024
