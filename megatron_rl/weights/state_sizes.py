"""Bytes of a trainer rank's parameters, gradients and optimizer states, as Megatron allocates them.

Megatron (0.16: `_ParamAndGradBuffer`, `DistributedOptimizer`, `Float16OptimizerWithFloat16Params`) puts the gradients
of all parameters in FP32 buffers: one for experts that are spread over ranks, one for everything else. With the
distributed optimizer the parameters themselves lie in such a buffer too. Parameters are then aligned to 64 elements,
and a buffer is padded to a multiple of 128 elements and of its data-parallel size. Each data-parallel rank owns an
equal part of a buffer, and holds the FP32 masters and both moments of the parameters in its part, without padding.

Invariant: parameters (BF16, FP32), gradients and optimizer states equal the bytes of Megatron's tensors
(tests/megatron_rl/weights/test_state_sizes.py). Adam's count of updates, 4 bytes, is left out.

Pure: no torch, no megatron.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

from megatron_rl.config import ParallelConfig, TrainerConfig
from megatron_rl.model.spec import ModelSpec, stage_layers
from megatron_rl.weights.name_table import TABLE, Kind, Rule, Split, Where
from rollout.weights.format import FP8_BLOCK

_ALIGNMENT, _BUCKET_ALIGNMENT = 64, 128
"""Elements to which a parameter's start and a buffer's end are aligned (distributed optimizer)."""
_FP32 = 4
_ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    "mlp.experts.local_experts.{}.linear_fc1.weight",
    "mlp.experts.local_experts.{}.linear_fc2.weight",
)
"""Parameters of a layer in the order of Megatron's module, on which the cut between data-parallel ranks depends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes that one trainer rank holds between and during steps."""

    parameters: int
    """FP8 codes of both orientations and their scales included."""
    gradients: int
    optimizer: tuple[int, ...]
    """Bytes of each tensor: masters (of BF16 parameters) and both moments of every parameter that the rank updates."""
    weight_storages: tuple[int, ...]
    """Bytes of each storage of the parameters; their sum is `parameters`."""

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of masters and moments."""
        return sum(self.optimizer)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.gradients + self.optimizer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a rank."""

    size: int
    """Elements, vocabulary padding included."""
    is_linear: bool
    of_expert: bool
    own_bucket: bool
    """A tied embedding has a bucket of its own if two pipeline stages hold it (distributed optimizer)."""


def rank_state(spec: ModelSpec, trainer: TrainerConfig, *, pipeline_rank: int, data_rank: int = 0) -> StateSizes:
    """State of the ranks at these coordinates; all tensor-parallel ranks hold the same number of bytes.

    Data-parallel rank 0 holds the most, apart from 63 elements for each parameter whose size is no multiple of 64.
    """
    return _state(stage_parameters(spec, trainer.parallel, pipeline_rank), trainer, data_rank=data_rank)


def critic_state(spec: ModelSpec, trainer: TrainerConfig, *, pipeline_rank: int, data_rank: int = 0) -> StateSizes:
    """The same of a critic with this architecture."""
    of_critic = trainer.model_copy(update={"optimizer": trainer.critic.optimizer, "fp8": "none"})
    return _state(critic_parameters(spec, trainer.parallel, pipeline_rank), of_critic, data_rank=data_rank)


def _state(parameters: Sequence[Parameter], trainer: TrainerConfig, *, data_rank: int) -> StateSizes:
    parallel, distributed = trainer.parallel, trainer.optimizer.distributed
    num_tensors = 3 if trainer.dtype == "bf16" else 2  # master and moments, or moments
    storages: list[int] = []
    optimizer: list[int] = []
    gradients = 0
    for group in _groups(parameters, trainer):
        spread = parallel.expert if group.of_spread_experts else 1
        num_replicas, replica = parallel.data // spread, data_rank // spread
        buckets = _buckets(group.parameters) if distributed else [group.parameters]
        padded = [_padded_size(bucket, num_replicas) if distributed else _size(bucket) for bucket in buckets]
        gradients += _FP32 * sum(padded)
        storages += _storages(group, sum(padded), trainer)
        for bucket, size in zip(buckets, padded, strict=True):
            owned = _owned(bucket, size // num_replicas, replica) if distributed else [item.size for item in bucket]
            optimizer += [_FP32 * elements for elements in owned for _ in range(num_tensors)]
    return StateSizes(
        parameters=sum(storages), gradients=gradients, optimizer=tuple(optimizer), weight_storages=tuple(storages)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Parameters that share gradient buffers."""

    parameters: Sequence[Parameter]
    of_spread_experts: bool
    in_fp8: bool


def _groups(parameters: Sequence[Parameter], trainer: TrainerConfig) -> Iterator[_Group]:
    """Parameters by what decides their buffer: experts that are spread over ranks, and FP8."""
    for of_spread_experts in (False, True):
        for in_fp8 in (False, True):
            chosen = [
                item
                for item in parameters
                if (item.of_expert and trainer.parallel.expert > 1) is of_spread_experts
                and (item.is_linear and trainer.fp8 == "blockwise_param") is in_fp8
            ]
            if chosen:
                yield _Group(parameters=chosen, of_spread_experts=of_spread_experts, in_fp8=in_fp8)


def _buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Buckets of a buffer: the last parameters first, and a tied embedding alone if two stages hold it."""
    buckets: list[list[Parameter]] = [[]]
    for item in reversed(parameters):
        if item.own_bucket:
            buckets += [[item], []]
        else:
            buckets[-1].append(item)
    return [bucket for bucket in buckets if bucket]


def _padded_size(bucket: Sequence[Parameter], num_replicas: int) -> int:
    aligned = sum(_aligned(item.size, _ALIGNMENT) for item in bucket)
    return _aligned(aligned, math.lcm(num_replicas, _BUCKET_ALIGNMENT))


def _owned(bucket: Sequence[Parameter], part: int, replica: int) -> list[int]:
    """Elements of each parameter of the bucket that data-parallel rank `replica` owns; parameters without any are
    left out. Each rank owns `part` elements of the bucket, padding included.
    """
    start, stop = replica * part, (replica + 1) * part
    owned, first = [], 0
    for item in bucket:
        owned.append(min(first + item.size, stop) - max(first, start))
        first += _aligned(item.size, _ALIGNMENT)
    return [size for size in owned if size > 0]


def _storages(group: _Group, padded: int, trainer: TrainerConfig) -> list[int]:
    """Bytes of each storage of a group's parameters.

    `blockwise` keeps FP8 codes by rows and by columns, with scales, beside BF16 parameters. `blockwise_param` keeps
    these codes instead; those by rows are in the buffer.
    """
    width = 1 if group.in_fp8 else 2 if trainer.dtype == "bf16" else 4
    sizes = [item.size for item in group.parameters]
    own = [width * padded] if trainer.optimizer.distributed else [width * size for size in sizes]
    if trainer.fp8 == "none":
        return own
    linear = [item.size for item in group.parameters if item.is_linear]
    orientations = 1 if group.in_fp8 else 2
    return own + [orientations * size + 2 * _FP32 * -(-size // FP8_BLOCK**2) for size in linear]


def _size(parameters: Sequence[Parameter]) -> int:
    return sum(item.size for item in parameters)


def _aligned(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@cache
def stage_parameters(spec: ModelSpec, parallel: ParallelConfig, pipeline_rank: int) -> tuple[Parameter, ...]:
    """Parameters of a rank of one pipeline stage, in the order of Megatron's module."""
    first, last = pipeline_rank == 0, pipeline_rank == parallel.pipeline - 1
    is_shared = spec.tied and parallel.pipeline > 1
    rules = [rule for rule in TABLE if rule.present(spec)]
    layer = _layer([rule for rule in rules if rule.where is Where.LAYER], spec, parallel)
    num_layers = len(stage_layers(spec.num_layers, parallel.pipeline)[pipeline_rank])
    outer = {where: [rule for rule in rules if rule.where is where] for where in (Where.FIRST, Where.LAST)}
    before = [_parameter([rule], spec, parallel, own_bucket=is_shared) for rule in outer[Where.FIRST]]
    after = [
        _parameter([rule], spec, parallel, own_bucket=rule.tied_copy)
        for rule in outer[Where.LAST]
        if not (rule.tied_copy and first)
    ]
    return (*(before if first else ()), *(layer * num_layers), *(after if last else ()))


@cache
def critic_parameters(spec: ModelSpec, parallel: ParallelConfig, pipeline_rank: int) -> tuple[Parameter, ...]:
    """The same of a critic, whose output layer is a head of one column."""
    parameters = stage_parameters(replace(spec, tied=False), parallel, pipeline_rank)
    if pipeline_rank < parallel.pipeline - 1:
        return parameters
    return (*parameters[:-1], replace(parameters[-1], size=spec.hidden_size))


def _layer(rules: Sequence[Rule], spec: ModelSpec, parallel: ParallelConfig) -> list[Parameter]:
    """Parameters of one layer; rules of one local name are parts of one parameter."""
    by_name: dict[str, list[Rule]] = {}
    for rule in rules:
        by_name.setdefault(rule.local.removeprefix("decoder.layers.{}."), []).append(rule)
    ordered = [by_name[name] for name in _ORDER if name in by_name]
    shared = [_parameter(parts, spec, parallel) for parts in ordered if not parts[0].per_expert]
    expert = [_parameter(parts, spec, parallel) for parts in ordered if parts[0].per_expert]
    num_experts = 0 if spec.experts is None else spec.experts.count // parallel.expert
    return [*shared, *(expert * num_experts)]


def _parameter(
    rules: Sequence[Rule], spec: ModelSpec, parallel: ParallelConfig, *, own_bucket: bool = False
) -> Parameter:
    size = 0
    for rule in rules:
        rows, *columns = rule.shape(spec)
        rows = spec.padded_vocab_size(parallel.tensor) if rule.split is Split.VOCAB else rows
        size += rows * math.prod(columns)
    ways = 1 if rules[0].split is Split.REPLICATED else parallel.tensor
    return Parameter(
        size=size // ways,
        is_linear=rules[0].kind is Kind.LINEAR,
        of_expert=rules[0].per_expert,
        own_bucket=own_bucket,
    )
