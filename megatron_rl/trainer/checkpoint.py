"""Saves and restores a model that learns, by Megatron's distributed checkpointing.

Parameters, FP32 master weights and Adam's moments are sharded tensors with global shapes, so a run can resume under
another tensor, pipeline or data partition. Each rank writes and reads its own part: `checkpoints.boxes` cuts the
optimizer's state, and replicas of a parameter are written by one data-parallel rank each. Generator states belong to
ranks: they are restored only under the partition that saved them. Training does not draw from them, because dropout
is 0.

FP8 parameters are saved as BF16 values and quantised on load. No value changes: a block whose largest code is 224 may
come back with doubled codes and half the scale. The next update quantises the master weights in either case.

A reference policy that changes during the run is saved without an optimizer. Its tensors have the names and places of
the policy's. One that never changes needs no file: it is the model that the run started from.

A checkpoint holds tensors, and numbers and texts that are no tensors, but no pickled objects. `load` checks that before
Megatron reads a file (`checkpoints.files`). The bytes of each tensor are checked before it is read
(`checkpoints.checked_reads`).
"""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import cast

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.checkpoints.boxes import METADATA, in_boxes
from megatron_rl.checkpoints.checked_reads import checked_reads
from megatron_rl.checkpoints.damage import DamagedCheckpointError, may_pass
from megatron_rl.checkpoints.files import COMPLETE_FILE, check_files
from megatron_rl.checkpoints.writer import CheckpointWriter
from megatron_rl.quantization.fp8_parameters import decoded, is_fp8_parameter
from megatron_rl.trainer.optimizer import LearnedModel, create_moments, follow_configuration, load_state, loadable
from megatron_rl.trainer.reference import Reference


def begin_save(
    path: Path,
    model: LearnedModel,
    writer: CheckpointWriter,
    *,
    background: bool,
    coefficients: Mapping[str, float] | None = None,
) -> None:
    """Start writing below the empty or missing directory `path`; a collective. `writer.finish` completes it.

    `coefficients` are those of the loss that have adapted to the run.
    Without `background` nothing may change the trainer's state before that.
    """
    path.mkdir(parents=True, exist_ok=True)
    create_moments(model.optimizer)
    with in_boxes(model.optimizer):
        state = _sharded_state(model, is_loading=False)
    state["generators"] = _generators()
    state["coefficients"] = dict(coefficients or {})
    writer.begin(state, path, background=background)


def load(path: Path, model: LearnedModel, *, optimizer_key: str = "trainer.optimizer") -> object:
    """Restore what a save wrote; a collective. Returns the saved coefficients; earlier versions have none.

    `optimizer_key` is where the configuration describes the model's optimizer.

    Raises:
        DamagedCheckpointError: its files are damaged or hold objects that may run code.
        ValueError: the directory holds no checkpoint, the optimizer was of another kind when saved, or expert
            parallelism was on when saved and is off now, or the reverse: Megatron keeps a separate optimizer for
            spread experts.
        OSError: a file cannot be read now.
    """
    if not is_complete(path):
        raise ValueError(f"{path} holds no trainer checkpoint; resume from a directory that a save completed")
    common, saved_keys = check_files(path)
    saved, spread = common.get("spread_experts", False), _spread_experts()
    if saved != spread:
        raise ValueError(
            f"{path} was saved with trainer.parallel.expert {'above' if saved else '='} 1, but it is "
            f"{'above 1' if spread else '1'} now; set it {'above' if saved else 'to'} 1"
        )
    _check_optimizer(path, saved_keys, model.optimizer, optimizer_key)
    same_partition = common["partition"] == _partition()
    with model.states_on_device(), loadable(model.optimizer), in_boxes(model.optimizer):
        state = _sharded_state(model, is_loading=True)
        if same_partition:
            state["generators"] = {name: entry for name, entry in _generators().items() if entry.key in saved_keys}
        restored = _read(state, path)
        for chunk in model.chunks:
            chunk.module.load_state_dict(restored["model"], strict=True)
        load_state(model.optimizer, restored["optimizer"])
    follow_configuration(model.optimizer, model.schedule)
    model.restore_schedule(cast(Mapping[str, float], common["schedule"]))  # which sets the present rate
    if same_partition:
        _restore_generators(restored.get("generators", {}))
    return common.get("coefficients", {})


def load_weights(path: Path, policy: GPTModel) -> None:
    """Restore the parameters of a policy that does not learn, under any partition; a collective.

    Raises:
        DamagedCheckpointError: its files are damaged or hold objects that may run code.
        ValueError: the directory holds no checkpoint.
        OSError: a file cannot be read now.
    """
    if not is_complete(path):
        raise ValueError(f"{path} holds no trainer checkpoint; name one that a save completed")
    check_files(path)
    weights = policy.sharded_state_dict()
    dict_list_map_inplace(_without_objects, weights)
    policy.load_state_dict(_read({"model": weights}, path)["model"], strict=True)


def is_complete(path: Path) -> bool:
    """Whether a save has completed this directory."""
    return (path / COMPLETE_FILE).exists()


def _read(state: dict[str, object], path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """A sharded state with the tensors of a checkpoint; a collective.

    Raises:
        DamagedCheckpointError: a file is missing, or a tensor's bytes are not those that were saved.
        ValueError: the tensors do not fit the model.
        OSError: a file cannot be read now.
        RuntimeError: memory ran out, or the like.
    """
    try:
        with checked_reads():
            restored: dict[str, dict[str, torch.Tensor]] = dist_checkpointing.load(
                state, str(path), sharded_strategy=("torch_dist", 1)
            )
    except CheckpointException as error:
        raise _failure(path, error) from error
    return restored


def _failure(path: Path, error: CheckpointException) -> Exception:
    """What the errors of the ranks mean together. One that may pass decides: damage is found again."""
    found = [(rank, cause) for rank, (cause, _) in error.failures.items()]
    rank, cause = next(((rank, cause) for rank, cause in found if may_pass(cause)), found[0])
    if isinstance(cause, OSError) and may_pass(cause):
        told = f"{cause.strerror or cause} while rank {rank} read the tensors of a checkpoint"
        return OSError(cause.errno, told, cause.filename or str(path))
    line = str(cause).strip().partition("\n")[0]
    told = line if isinstance(cause, DamagedCheckpointError) else f"{type(cause).__name__}: {line}"
    message = f"the tensors of {path} cannot be read: rank {rank}: {told}"
    if may_pass(cause):
        return RuntimeError(message)
    is_damage = isinstance(cause, (DamagedCheckpointError, FileNotFoundError, RuntimeError))
    return DamagedCheckpointError(message) if is_damage else ValueError(message)


def _check_optimizer(path: Path, saved_keys: Set[str], optimizer: MegatronOptimizer, key: str) -> None:
    """Refuse the state of another kind of optimizer, which has other names and another structure.

    Masters are named `param` by the distributed optimizer and `fp32_param` by that of BF16 weights. The optimizer of
    FP32 weights has none.

    Raises:
        ValueError: with the keys and the values to restore.
    """
    states = {name.split(".")[2] for name in saved_keys if name.startswith("optimizer.state.")}
    config, was_distributed = optimizer.config, "param" in states
    settings = {f"{key}.distributed": (_yaml(was_distributed), _yaml(config.use_distributed_optimizer))}
    if not was_distributed:
        settings["trainer.dtype"] = ("bf16" if "fp32_param" in states else "fp32", "bf16" if config.bf16 else "fp32")
    changed = [
        f"{name}={saved}, but it is {present} now; set it to {saved}"
        for name, (saved, present) in settings.items()
        if saved != present
    ]
    if changed:
        raise ValueError(f"{path} was saved with {', and with '.join(changed)}")


def _yaml(value: bool) -> str:
    return "true" if value else "false"


def _spread_experts() -> bool:
    return int(parallel_state.get_expert_model_parallel_world_size()) > 1


def _sharded_state(model: LearnedModel, *, is_loading: bool) -> dict[str, object]:
    (chunk,) = model.chunks
    weights = chunk.module.sharded_state_dict()
    optimizer = model.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=METADATA)
    _decode(weights)
    dict_list_map_inplace(_without_objects, weights)
    return {
        "model": weights,
        "optimizer": optimizer,
        "schedule": model.schedule.state_dict(),
        "partition": _partition(),
        "spread_experts": _spread_experts(),
    }


def _without_objects(entry: object) -> object:
    """Keep a module's object out of the checkpoint, where it would be pickled.

    These are the extra states of Transformer Engine's layers, which hold nothing but the recipe: block scaling has no
    history of maxima.
    """
    return LocalNonpersistentObject(entry.data) if isinstance(entry, ShardedObject) else entry


def _decode(model: dict[str, object]) -> None:
    """Replace FP8 parameters by BF16 tensors on the CPU.

    Megatron does so on load (`force_all_tensors_to_non_fp8`, on the device) but not on save. Call it after the
    optimizer's state is built, because that finds its parameters by identity.
    """
    for entry in nested_values(model):
        if is_fp8_parameter(data := getattr(entry, "data", None)):
            entry.data = decoded(data).cpu()


def _partition() -> tuple[int, int, int]:
    return (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_data_parallel_world_size(),
    )


def _generators() -> dict[str, ShardedTensor]:
    """This rank's generator states by name, at its coordinate (pipeline, tensor, data)."""
    tensor, pipeline, data = _partition()
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    trackers = tensor_parallel.get_cuda_rng_tracker().get_states()
    states |= {f"{_TRACKER}{name}": state for name, state in trackers.items()}
    offsets = (
        (0, parallel_state.get_pipeline_model_parallel_rank(), pipeline),
        (1, parallel_state.get_tensor_model_parallel_rank(), tensor),
        (2, parallel_state.get_data_parallel_rank(), data),
    )
    return {
        name: ShardedTensor.from_rank_offsets(f"generators.{name}", state.clone(), *offsets, prepend_axis_num=3)
        for name, state in states.items()
    }


_TRACKER = "megatron."
"""Begins the names of the generators that Megatron tracks."""


def _restore_generators(states: dict[str, torch.Tensor]) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    tracked = {name.removeprefix(_TRACKER): state for name, state in states.items() if name.startswith(_TRACKER)}
    if tracked:
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)


def begin_reference_save(
    path: Path, policy: LearnedModel, reference: Reference, writer: CheckpointWriter, *, background: bool
) -> None:
    """Start writing below `path`; a collective. See `begin_save`."""
    path.mkdir(parents=True, exist_ok=True)
    writer.begin(_sharded_reference(policy, reference), path, background=background)


def load_reference(path: Path, policy: LearnedModel, reference: Reference) -> None:
    """Restore the reference; a collective, and possible under another partition.

    Raises:
        DamagedCheckpointError: the files are damaged or hold objects that may run code.
        OSError: a file cannot be read now.
    """
    check_files(path)
    restored = _read(_sharded_reference(policy, reference), path)
    with torch.no_grad():
        for name, weight in reference.weights().items():
            weight.copy_(restored["model"][name])


def _sharded_reference(policy: LearnedModel, reference: Reference) -> dict[str, object]:
    """The policy's sharded weights with the reference's tensors in their places. RuntimeError if one has no place."""
    (chunk,) = policy.chunks
    entries = chunk.module.sharded_state_dict()
    held = reference.weights()
    of_parameter = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
    missing = set(of_parameter.values())
    for entry in nested_values(entries):
        if (name := of_parameter.get(id(entry.data))) is not None:
            entry.data = held[name]
            missing.discard(name)
    if missing:  # their entries would keep the policy's weights
        raise RuntimeError(f"the sharded state has no entry of {sorted(missing)}: the reference cannot be kept")
    dict_list_map_inplace(_without_objects, entries)
    return {"model": entries}
