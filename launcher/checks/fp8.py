"""Refuses settings that `trainer.fp8` cannot be combined with, and warns of lossy combinations.

The bounds are Transformer Engine's (2.12: `check_fp8_block_scaling_support`, `assert_dim_for_fp8_exec`,
`assert_dim_for_all_gather`, the leading dimensions in `cublaslt_gemm.cu`) and Megatron's (FP8 parameters belong to the
distributed optimizer: `DistributedOptimizer._copy_main_params_to_model_params`).
"""

from launcher.cluster.node import NodeResources
from megatron_rl.config import TrainerConfig
from megatron_rl.model.spec import ModelSpec, check_parallel
from megatron_rl.weights.fp8_passthrough import cut_otherwise, rank_matrices
from rollout.weights.format import FP8_BLOCK, WeightFormat

OLDEST_GPU = (9, 0)
"""Lowest compute capability with block scaling in Transformer Engine."""

MULTIPLE = 16
"""Rows and columns of matrices in FP8 products (forward, input gradient, weight gradient) are multiples of it."""


def fp8_problems(spec: ModelSpec, trainer: TrainerConfig, node: NodeResources) -> list[str]:
    """Problems of `trainer.fp8` with this model, trainer and machine."""
    if trainer.fp8 == "none":
        return []
    return [*_machine(trainer, node), *_keys(trainer), *_shapes(spec, trainer)]


def _machine(trainer: TrainerConfig, node: NodeResources) -> list[str]:
    if not node.gpu_bytes:
        return [f"`trainer.fp8` = {trainer.fp8}: a trainer on a CPU has no FP8 products; set it to none"]
    if node.gpu_capability is not None and node.gpu_capability < OLDEST_GPU:
        present, needed = (".".join(map(str, capability)) for capability in (node.gpu_capability, OLDEST_GPU))
        return [
            f"`trainer.fp8` = {trainer.fp8}: this node's GPU has compute capability {present}, block-wise FP8 needs "
            f"{needed}; set it to none"
        ]
    return []


def _keys(trainer: TrainerConfig) -> list[str]:
    problems = []
    if trainer.dtype != "bf16":
        problems.append(
            f"`trainer.fp8` = {trainer.fp8} with `trainer.dtype` = {trainer.dtype}: FP8 products have bf16 inputs and "
            "outputs; set dtype to bf16, or fp8 to none"
        )
    if trainer.fp8 == "blockwise_param" and not trainer.optimizer.distributed:
        problems.append(
            "`trainer.fp8` = blockwise_param with `trainer.optimizer.distributed` = false: only Megatron's distributed "
            "optimizer updates weights that are FP8; set distributed to true, or fp8 to blockwise"
        )
    return problems


def _shapes(spec: ModelSpec, trainer: TrainerConfig) -> list[str]:
    parallel = trainer.parallel
    if not _is_cut_evenly(spec, trainer):
        return []
    if parallel.tensor > spec.num_kv_heads:
        return [
            f"`trainer.fp8` = {trainer.fp8} with `trainer.parallel.tensor` = {parallel.tensor}: ranks would share the "
            f"model's {spec.num_kv_heads} key/value heads, which has not been tried with FP8; set tensor to "
            f"{spec.num_kv_heads} or a divisor, or fp8 to none"
        ]
    problems = [
        f"`trainer.fp8` = {trainer.fp8} with `trainer.parallel.tensor` = {parallel.tensor}: each rank would hold a "
        f"matrix of {shape[0]} x {shape[1]} ({name.removeprefix('decoder.layers.0.')}), and FP8 products need "
        f"multiples of {MULTIPLE}; use another tensor, or set fp8 to none"
        for name, shape in rank_matrices(spec, parallel).items()
        if any(size % MULTIPLE for size in shape)
    ]
    if parallel.tensor > 1 and spec.hidden_size % FP8_BLOCK:
        problems.append(
            f"`trainer.fp8` = {trainer.fp8} with `trainer.parallel.tensor` = {parallel.tensor}: activations are "
            f"gathered in blocks of {FP8_BLOCK}, and the model's hidden size {spec.hidden_size} is no multiple of it; "
            "set tensor to 1, or fp8 to none"
        )
    return problems


def _is_cut_evenly(spec: ModelSpec, trainer: TrainerConfig) -> bool:
    """Whether the partition divides the model; `check_parallel` reports it otherwise, and shapes are unknown."""
    try:
        check_parallel(spec, trainer.parallel)
    except ValueError:
        return False
    return True


def fp8_warnings(spec: ModelSpec, trainer: TrainerConfig, format: WeightFormat) -> list[str]:
    """Warnings about FP8 weights of the trainer that are quantised twice."""
    if trainer.fp8 != "blockwise_param" or format.name == "bf16":
        return []
    if format.name != "fp8_block":
        return [
            f"`trainer.fp8` = blockwise_param with `engine.format` = {format.name}: weights are rounded by the "
            "trainer and again for engines; fp8_block sends the trainer's own codes"
        ]
    if recut := cut_otherwise(spec, trainer.parallel):
        return [
            f"`trainer.fp8` = blockwise_param: {', '.join(recut)} have other blocks of {FP8_BLOCK} x {FP8_BLOCK} in "
            "the trainer than in engines, so they are quantised again (publish/as_is_share: share sent unchanged)"
        ]
    return []
