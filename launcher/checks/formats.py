"""Refuses 8-bit formats that an engine could not hold, and warns of those that hardly pay. Pure: no torch."""

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from launcher.cluster.node import NodeResources
from megatron_rl.memory import num_parameters
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.shards import Kind, whole_shards
from rollout.config import EngineConfig
from rollout.weights.format import FP8_BLOCK, FUSED, FUSED_EXPERTS, WeightFormat
from rollout.weights.manifest import stack_of

WORTH_8_BIT = 14_000_000_000
"""Parameters from which 8-bit rollouts gain clearly on GPUs (FlashRL's measurements)."""


def weight_format_problems(spec: ModelSpec, engine: EngineConfig, node: NodeResources) -> list[str]:
    """What is wrong with `engine.format`, its exceptions and `engine.tensor_parallel` for this model."""
    format = WeightFormat.of(engine)
    if format.layout is None:
        return []
    shapes = linear_shapes(spec)
    problems = []
    if spec.experts is not None and not node.gpu_bytes:
        problems.append(
            f"`engine.format` = {engine.format}: the model has {spec.experts.count} experts, and vLLM multiplies "
            "experts in 8 bits on GPUs only; set it to bf16"
        )
    problems += [*_layers(spec, format), *_patterns(shapes, format), *_fused(shapes, format, spec.num_layers)]
    quantised = {name: shape for name, shape in shapes.items() if not format.excepts(name, spec.num_layers)}
    if engine.format == "fp8_block":
        problems += _blocks(quantised, engine.tensor_parallel)
    return problems


def weight_format_warnings(spec: ModelSpec, engine: EngineConfig, node: NodeResources) -> list[str]:
    """What a user should know of a format that will work."""
    if engine.format == "bf16":
        return []
    if node.gpu_bytes and (size := num_parameters(spec)) < WORTH_8_BIT:
        return [
            f"`engine.format` = {engine.format}: the model has {size / 1e9:.1f} billion parameters; below about "
            f"{WORTH_8_BIT / 1e9:.0f} billion 8-bit rollouts are rarely faster than bf16 on GPUs: measure both"
        ]
    if not node.gpu_bytes and engine.format.startswith("fp8"):
        return [f"`engine.format` = {engine.format}: FP8 is emulated on CPUs; its numbers are FP8's, its speed is not"]
    return []


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Hugging Face name and shape of each matrix of the decoder layers, in order; of all experts one without number."""
    linears = (shard for shard in whole_shards(spec) if shard.kind is Kind.LINEAR)
    return {stack_of(shard.hf_name): shard.hf_full_shape for shard in linears}


def _layers(spec: ModelSpec, format: WeightFormat) -> Iterator[str]:
    if format.bf16_first_layers + format.bf16_last_layers >= spec.num_layers:
        yield (
            f"`engine.bf16_first_layers` + `engine.bf16_last_layers` = {format.bf16_first_layers} + "
            f"{format.bf16_last_layers} leave none of the model's {spec.num_layers} layers to `engine.format` = "
            f"{format.name}; lower them, or set the format to bf16"
        )


def _patterns(shapes: dict[str, tuple[int, ...]], format: WeightFormat) -> Iterator[str]:
    modules = [name.removesuffix(".weight") for name in shapes]
    for pattern in format.bf16_modules:
        if not any(fnmatchcase(module, pattern) for module in modules):
            near = difflib.get_close_matches(pattern, [*modules, *(f"*.{m.split('.')[-1]}" for m in modules)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"`engine.bf16_modules` holds {pattern!r}, which is the name of no linear of the model{hint}"


def _fused(shapes: dict[str, tuple[int, ...]], format: WeightFormat, num_layers: int) -> Iterator[str]:
    judged = set()
    for name in shapes:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        for group in (FUSED_EXPERTS,) if parent.endswith(".experts") else FUSED:
            if leaf == group[0]:
                kept = [one for one in group if format.excepts(f"{parent}.{one}.weight", num_layers)]
                if 0 < len(kept) < len(group) and group not in judged:
                    judged.add(group)
                    yield (
                        f"`engine.bf16_modules` excepts {', '.join(kept)} of {parent}, but vLLM holds "
                        f"{', '.join(group)} as one; except all of them or none"
                    )


def _blocks(shapes: dict[str, tuple[int, ...]], tensor_parallel: int) -> Iterator[str]:
    """The rule of vLLM itself: no block may lie on two ranks, or in two of the matrices that it holds as one."""
    may_end_anywhere = {group[-1] for group in FUSED} if tensor_parallel == 1 else set()
    fused = {leaf for group in FUSED for leaf in group}
    judged = set()
    for name, (rows, columns) in shapes.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        size, what = (rows, "rows") if leaf in fused else (columns, "columns")
        whole = leaf in may_end_anywhere or (leaf not in fused and tensor_parallel == 1)
        if whole or leaf in judged or size / tensor_parallel % FP8_BLOCK == 0:
            continue
        judged.add(leaf)
        yield (
            f"`engine.format` = fp8_block with `engine.tensor_parallel` = {tensor_parallel}: each rank would hold "
            f"{size / tensor_parallel:g} {what} of {name}, which is no multiple of {FP8_BLOCK}; use another "
            "tensor_parallel, or fp8_channel"
        )
