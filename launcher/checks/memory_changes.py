"""Single changes of a configuration that may free memory. Pure.

Each change is one step that a person would try: half of a size, the next larger partition, or a switch. Changes of the
partition keep the number of trainer ranks, but for half of the replicas, which frees host memory. Whether a change
frees anything, and how much, is computed from the tables of the changed run (`launcher.checks.memory`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.checks.combinations import run_combinations
from launcher.checks.model import model_problems
from launcher.cluster.node import NodeResources
from launcher.config.schema import RunConfig
from megatron_rl.model.spec import ModelSpec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedConfig:
    """A configuration with one key changed, or with a partition that has the same number of ranks."""

    key: str
    value: str
    config: RunConfig


def changes_of(config: RunConfig) -> Iterator[ChangedConfig]:
    """Changes of keys that have another value now; they may conflict with other keys."""
    for key in _HALVED:
        value = _value(config, key)
        if isinstance(value, int) and value > 1:
            yield _change(config, key, value // 2)
    for key, values in _SWITCHED.items():
        present = _value(config, key)
        for other in values:
            if other != present and not (key == "engine.format" and present != "bf16"):
                yield _change(config, key, other)
    turns = _updated(_updated(config, "trainer.offload", "all"), "engine.sleep_level", 2)
    if turns != config:
        yield ChangedConfig(key="engine.sleep_level", value="2 with trainer.offload = all", config=turns)
    for optimizer in ("trainer.optimizer", "trainer.critic.optimizer"):
        if not _value(config, f"{optimizer}.distributed") and not _value(config, f"{optimizer}.states_on_host"):
            hosted = _updated(_updated(config, f"{optimizer}.distributed", True), f"{optimizer}.states_on_host", True)
            yield ChangedConfig(key=f"{optimizer}.states_on_host", value="true with distributed = true", config=hosted)
    yield _change(config, "engine.tensor_parallel", 2 * config.engine.tensor_parallel)
    yield from _partitions(config)


def conflicts(config: RunConfig, spec: ModelSpec, node: NodeResources) -> set[str]:
    """Problems that other checks find in a configuration."""
    return {*run_combinations(config), *model_problems(config, spec, node)}


def _partitions(config: RunConfig) -> Iterator[ChangedConfig]:
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


def _change(config: RunConfig, key: str, value: str | int | bool) -> ChangedConfig:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return ChangedConfig(key=key, value=text, config=_updated(config, key, value))


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _updated(config: RunConfig, key: str, value: object) -> RunConfig:
    """A copy with the value at a dotted key."""
    *parents, last = key.split(".")
    holders = [config]
    for name in parents:
        holders.append(getattr(holders[-1], name))
    for name, holder in zip([*parents, last][::-1], holders[::-1], strict=True):
        value = holder.model_copy(update={name: value})
    assert isinstance(value, RunConfig)
    return value
