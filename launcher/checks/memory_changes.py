"""Single changes of a configuration that may free memory. Pure.

Each change is one step that a person would try: half of a size, the next larger partition, or a switch. Changes of the
partition keep the number of trainer ranks, but for half of the replicas, which frees host memory. Whether a change
frees anything, and how much, is computed from the tables of the changed run (`launcher.checks.memory`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from launcher.checks.combinations import run_combinations
from launcher.checks.model import model_problems, sft_problems
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig, SftConfig
from launcher.estimate.host_memory import book_bytes
from megatron_rl.model.spec import ModelSpec

AnyConfig = TypeVar("AnyConfig", RunConfig, SftConfig)

_HALVED = (
    "engine.kv_cache_bytes",
    "engine.max_num_seqs",
    "trainer.max_micro_batch_tokens",
    "trainer.logprob_chunk_tokens",
    "sampling.max_response_tokens",
    "history.budget_bytes",
    "history.shm_bytes",
    "cluster.object_store_bytes",
    "publish.bucket_bytes",
)
"""Sizes that may be halved."""
_SWITCHED: dict[str, tuple[str | int | bool, ...]] = {
    "trainer.optimizer.distributed": (True,),
    "trainer.critic.optimizer.distributed": (True,),
    "trainer.optimizer.states_on_host": (True, False),
    "trainer.critic.optimizer.states_on_host": (True, False),
    "trainer.reference.place": ("host", "device"),
    "trainer.recompute": ("full", "selective"),
    "trainer.offload": ("all", "optimizer", "none"),
    "engine.sleep_level": (2, 0),
    "engine.format": ("fp8_channel", "int8"),
    "publish.delta": (False,),
    "history.drafts": (False,),
}
"""Other values of keys."""
_SFT_HALVED = (
    "trainer.max_micro_batch_tokens",
    "trainer.logprob_chunk_tokens",
    "data.max_tokens",
    "cluster.object_store_bytes",
)
"""Sizes of a warm start that may be halved."""
_SFT_SWITCHED = ("trainer.optimizer.distributed", "trainer.optimizer.states_on_host", "trainer.recompute")
"""Keys of `_SWITCHED` that a warm start has."""

LARGE_BOOK_BYTES = 8 << 30
"""Bound of the lengths of responses above which fewer steps are proposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedConfig(Generic[AnyConfig]):
    """A configuration with one key changed, or with a partition that has the same number of ranks."""

    key: str
    value: str
    config: AnyConfig


def changes_of(config: RunConfig) -> Iterator[ChangedConfig[RunConfig]]:
    """Changes of keys that have another value now; they may conflict with other keys."""
    yield from _changes(config, _HALVED, tuple(_SWITCHED))
    turns = _updated(_updated(config, "trainer.offload", "all"), "engine.sleep_level", 2)
    if turns != config:
        yield ChangedConfig(key="engine.sleep_level", value="2 with trainer.offload = all", config=turns)
    yield from _hosted(config, "trainer.critic.optimizer")
    if book_bytes(config, num_prompts=0) > LARGE_BOOK_BYTES:  # less is not worth a shorter run
        yield _change(config, "num_steps", config.num_steps // 2)
    yield _change(config, "engine.tensor_parallel", 2 * config.engine.tensor_parallel)


def sft_changes_of(config: SftConfig) -> Iterator[ChangedConfig[SftConfig]]:
    """As `changes_of`, for a warm start."""
    yield from _changes(config, _SFT_HALVED, _SFT_SWITCHED)


def sft_conflicts(config: SftConfig, spec: ModelSpec, node: NodeResources) -> set[str]:
    """Problems that other checks find in the configuration of a warm start."""
    return set(sft_problems(config, spec, node))


def conflicts(config: RunConfig, spec: ModelSpec, node: NodeResources) -> set[str]:
    """Problems that other checks find in a configuration."""
    return {*run_combinations(config), *model_problems(config, spec, node)}


def _changes(
    config: AnyConfig, halved: tuple[str, ...], switched: tuple[str, ...]
) -> Iterator[ChangedConfig[AnyConfig]]:
    """Halves of sizes, other values of keys, states in host memory, and other partitions."""
    for key in halved:
        value = _value(config, key)
        if isinstance(value, int) and value > 1:
            yield _change(config, key, value // 2)
    for key in switched:
        present = _value(config, key)
        for other in _SWITCHED[key]:
            if other != present and not (key == "engine.format" and present != "bf16"):
                yield _change(config, key, other)
    yield from _hosted(config, "trainer.optimizer")
    yield from _partitions(config)


def _hosted(config: AnyConfig, optimizer: str) -> Iterator[ChangedConfig[AnyConfig]]:
    """States of this optimizer in host memory, with the layout that they need."""
    if not _value(config, f"{optimizer}.distributed") and not _value(config, f"{optimizer}.states_on_host"):
        hosted = _updated(_updated(config, f"{optimizer}.distributed", True), f"{optimizer}.states_on_host", True)
        yield ChangedConfig(key=f"{optimizer}.states_on_host", value="true with distributed = true", config=hosted)


def _partitions(config: AnyConfig) -> Iterator[ChangedConfig[AnyConfig]]:
    """Twice the tensor, pipeline or expert size, with as many ranks as before; and half of the replicas."""
    parallel = config.trainer.parallel
    if parallel.data % 2 == 0:
        yield _change(config, "trainer.parallel.data", parallel.data // 2)
        for name in ("tensor", "pipeline"):
            size = 2 * getattr(parallel, name)
            halved = parallel.model_copy(update={name: size, "data": parallel.data // 2})
            changed = _updated(config, "trainer.parallel", halved)
            yield ChangedConfig(
                key=f"trainer.parallel.{name}", value=f"{size} with data = {halved.data}", config=changed
            )
    yield _change(config, "trainer.parallel.expert", 2 * parallel.expert)


def _change(config: AnyConfig, key: str, value: str | int | bool) -> ChangedConfig[AnyConfig]:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return ChangedConfig(key=key, value=text, config=_updated(config, key, value))


def _value(config: RunConfig | SftConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _updated(config: AnyConfig, key: str, value: object) -> AnyConfig:
    """A copy with the value at a dotted key."""
    *parents, last = key.split(".")
    holders = [config]
    for name in parents:
        holders.append(getattr(holders[-1], name))
    for name, holder in zip([*parents, last][::-1], holders[::-1], strict=True):
        value = holder.model_copy(update={name: value})
    assert isinstance(value, type(config))
    return value
