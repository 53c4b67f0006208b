"""Refuses 8-bit formats that an engine cannot compute with, and warns of formats with little gain. Pure: no torch."""

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache

from launcher.cluster.node import NodeResources
from megatron_rl.memory import num_parameters
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.shards import Kind, whole_shards
from rollout.config import KvFormat
from rollout.weights.format import FP8_BLOCK, FUSED, FUSED_EXPERTS, WeightFormat
from rollout.weights.manifest import stack_of

FP8_SINCE = (8, 9)
"""Lowest compute capability with FP8."""
INT8_BEFORE = (10, 0)
"""Lowest compute capability without INT8 products in vLLM 0.25.1: its CUTLASS kernel claims every INT8 layer there, and
raises an error in the first forward (https://github.com/vllm-project/vllm/pull/25935)."""

FP8_KV_HEAD_MULTIPLE = 32
"""Sizes of heads with FP8 keys and values in vLLM's attention on CPUs are multiples of it."""

WORTH_8_BIT = 14_000_000_000
"""Number of parameters above which 8-bit rollouts are clearly faster on GPUs (FlashRL's measurements)."""


def weight_format_problems(
    spec: ModelSpec, format: WeightFormat, node: NodeResources, *, tensor_parallel: int
) -> list[str]:
    """Problems of `engine.format`, its exceptions and `engine.tensor_parallel` with this model."""
    if format.layout is None:
        return []
    shapes = linear_shapes(spec)
    problems = [*_capability(format, node)]
    if spec.experts is not None and not node.gpu_bytes:
        problems.append(
            f"`engine.format` = {format.name}: the model has {spec.experts.count} experts, and vLLM multiplies "
            "experts in 8 bits on GPUs only; set it to bf16"
        )
    problems += [*_layers(spec, format), *_patterns(shapes, format), *_fused(shapes, format, spec.num_layers)]
    quantised = {name: shape for name, shape in shapes.items() if not format.excepts(name, spec.num_layers)}
    if format.name == "fp8_block":
        problems += _blocks(quantised, tensor_parallel)
    return problems


def kv_format_problems(spec: ModelSpec, kv_format: KvFormat, node: NodeResources) -> list[str]:
    """Problems of `engine.kv_format` with this model and machine: what vLLM's attention computes with FP8 codes."""
    if kv_format == "bf16":
        return []
    if node.gpu_bytes:
        reason = _without_fp8(node)
    elif not node.has_avx512:
        reason = "this node's CPU has no AVX-512, which vLLM needs for it"
    elif spec.head_dim % FP8_KV_HEAD_MULTIPLE:
        multiple = FP8_KV_HEAD_MULTIPLE
        reason = f"heads of the model have size {spec.head_dim}, and vLLM needs a multiple of {multiple} on a CPU"
    else:
        reason = ""
    return [f"`engine.kv_format` = {kv_format}: {reason}; set it to bf16"] if reason else []


def _capability(format: WeightFormat, node: NodeResources) -> Iterator[str]:
    """Refuses a format whose products the node's GPUs lack; GPUs of unknown capability are refused by the job."""
    if not node.gpu_bytes or node.gpu_capability is None:
        return
    if format.name == "int8" and node.gpu_capability >= INT8_BEFORE:
        yield (
            f"`engine.format` = int8: this node's GPU has compute capability {_dotted(node.gpu_capability)}, and "
            f"vLLM's INT8 kernels end before {_dotted(INT8_BEFORE)}; set it to fp8_channel"
        )
    if format.name.startswith("fp8") and (reason := _without_fp8(node)):
        yield f"`engine.format` = {format.name}: {reason}; set it to int8"


def _without_fp8(node: NodeResources) -> str:
    """Why the node's GPUs have no FP8 products; empty if they have, or if their capability is unknown."""
    if node.gpu_capability is None or node.gpu_capability >= FP8_SINCE:
        return ""
    capability, needed = _dotted(node.gpu_capability), _dotted(FP8_SINCE)
    return f"this node's GPU has compute capability {capability}, and FP8 needs {needed}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def weight_format_warnings(spec: ModelSpec, format: WeightFormat, node: NodeResources) -> list[str]:
    """Warnings about a format that works."""
    if format.name == "bf16":
        return []
    if node.gpu_bytes and (size := num_parameters(spec)) < WORTH_8_BIT:
        return [
            f"`engine.format` = {format.name}: the model has {size / 1e9:.1f} billion parameters; below about "
            f"{WORTH_8_BIT / 1e9:.0f} billion 8-bit rollouts are rarely faster than bf16 on GPUs: measure both"
        ]
    if not node.gpu_bytes and format.name.startswith("fp8"):
        return [f"`engine.format` = {format.name}: FP8 is emulated on CPUs: exact values, but slow"]
    return []


@cache
def linear_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Shape of each matrix of the decoder layers by Hugging Face name, in order; the experts of a layer share a name
    without expert number.
    """
    linears = (shard for shard in whole_shards(spec) if shard.kind is Kind.LINEAR)
    return {stack_of(shard.hf_name): shard.hf_full_shape for shard in linears}


def _layers(spec: ModelSpec, format: WeightFormat) -> Iterator[str]:
    if format.bf16_first_layers + format.bf16_last_layers >= spec.num_layers:
        yield (
            f"`engine.bf16_first_layers` + `engine.bf16_last_layers` = {format.bf16_first_layers} + "
            f"{format.bf16_last_layers} leave none of the model's {spec.num_layers} layers to `engine.format` = "
            f"{format.name}; lower them, or set the format to bf16"
        )


def _patterns(shapes: Mapping[str, tuple[int, ...]], format: WeightFormat) -> Iterator[str]:
    modules = [name.removesuffix(".weight") for name in shapes]
    for pattern in format.bf16_modules:
        if not any(fnmatchcase(module, pattern) for module in modules):
            near = difflib.get_close_matches(pattern, [*modules, *(f"*.{m.split('.')[-1]}" for m in modules)], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield f"`engine.bf16_modules` holds {pattern!r}, which matches no linear layer of the model{hint}"


def _fused(shapes: Mapping[str, tuple[int, ...]], format: WeightFormat, num_layers: int) -> Iterator[str]:
    reported = set()
    for name in shapes:
        parent, _, leaf = name.removesuffix(".weight").rpartition(".")
        for group in (FUSED_EXPERTS,) if parent.endswith(".experts") else FUSED:
            if leaf == group[0]:
                excepted = [matrix for matrix in group if format.excepts(f"{parent}.{matrix}.weight", num_layers)]
                if 0 < len(excepted) < len(group) and group not in reported:
                    reported.add(group)
                    yield (
                        f"`engine.bf16_modules` excepts {', '.join(excepted)} of {parent}, but vLLM fuses "
                        f"{', '.join(group)} into one matrix; except all of them or none"
                    )


def _blocks(shapes: Mapping[str, tuple[int, ...]], tensor_parallel: int) -> Iterator[str]:
    """The rule of vLLM: no block may span two ranks, or two matrices that vLLM fuses into one."""
    last_of_fused = {group[-1] for group in FUSED} if tensor_parallel == 1 else set()
    fused = {leaf for group in FUSED for leaf in group}
    reported = set()
    for name, (rows, columns) in shapes.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        size, axis = (rows, "rows") if leaf in fused else (columns, "columns")
        uncut = leaf in last_of_fused or (leaf not in fused and tensor_parallel == 1)
        if uncut or leaf in reported or size / tensor_parallel % FP8_BLOCK == 0:
            continue
        reported.add(leaf)
        yield (
            f"`engine.format` = fp8_block with `engine.tensor_parallel` = {tensor_parallel}: each rank would hold "
            f"{size / tensor_parallel:g} {axis} of {name}, which is no multiple of {FP8_BLOCK}; use another "
            "tensor_parallel, or fp8_channel"
        )
