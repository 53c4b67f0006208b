"""Memory of the host of one node in each phase of a step. Pure.

Sources of what is not obvious:

* *pinned offload*: `megatron_rl.trainer.offload` copies every storage into pinned memory. torch rounds each to a power
  of two (`CachingHostAllocator`) and keeps it for the next time, so it is held in every phase. Gradients are not
  copied. Masters and moments with `trainer.optimizer.states_on_host` lie in such memory too.
* *reference copies*: with `trainer.reference.place` = host a rank keeps a copy of its part of the reference policy in
  pinned memory (`megatron_rl.trainer.reference`).
* *sleeping weights*: with `engine.sleep_level` = 1 vLLM copies weights into pinned memory (`CuMemAllocator.sleep`).
* *checkpoint copies*: with `checkpoint.background` a rank writes from copies of its own part of a checkpoint
  (`megatron_rl.checkpoints.writer`), in pinned memory that it keeps. Without it, one tensor at a time.
* *page cache*: files of the model and of the checkpoint; the system drops it when memory is short.

Constants without a measurement are named estimates.
"""

from collections.abc import Sequence

from history.lengths.book import KEPT_VISITS, most_bytes
from history.store.prompt_store import RESPONSE_BYTES
from launcher.config.schema import RunConfig
from launcher.estimate.device_memory import columns
from launcher.estimate.loads import NodeLoad
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_memory import host_baselines, host_publish_items
from launcher.estimate.tables import MemoryTable
from megatron_rl.config import OptimizerConfig, TrainerConfig
from megatron_rl.memory import ENGINE_PROCESS_BYTES, TRAINER_PROCESS_BYTES, MemoryItem, checkpoint_bytes, num_parameters
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.state_sizes import StateSizes, critic_state, rank_state

GPU_PROCESS_BYTES = 3 << 30
"""Host memory of a process with CUDA libraries, beside that of the same process on a CPU; an estimate."""
RAY_BYTES = 1 << 30
"""Raylet, agents and, on the first node, Ray's head processes; an estimate."""
CONTROLLER_BYTES = 1 << 30
"""The controller without the lengths of responses; an estimate."""
TOKENIZER_PROCESS_BYTES = 512 << 20
"""A text actor or a scorer: a process with a tokenizer; an estimate."""
REWARD_WORKER_BYTES = 128 << 20
"""A reward worker; an estimate."""
HISTORY_PROCESS_BYTES = 200 << 20
"""Resident memory of an empty history shard or reader."""
SEGMENT_TOKEN_BYTES = 10
"""Bytes of a token, of its suffix-array entry, and its share of the search tree and of the tables; an upper bound."""
SEGMENT_FILE_BYTES = 2 * 4096
"""Of a segment's file beside its tokens: header, tables of short responses, and the rest of its last page."""
SLEEP_ROUNDING = 1.5
"""Pinned bytes for each byte of sleeping weights: powers of two are between 1 and 2 times; an estimate."""
SHARED_MEMORY = frozenset({"object store", "history segments", "weights in transit"})
"""Items that lie in `/dev/shm`."""


def host_table(run: PlannedRun, load: NodeLoad, *, count: int, available_bytes: int) -> MemoryTable:
    """The table of `count` nodes that hold `load`."""
    always = [
        *_processes(run, load),
        *history_items(run, load),
        *_pinned(run, load),
        *reference_copies(run, load, pinned=True),
        *checkpoint_copies(run, load),
        *host_baselines(run, load),
    ]
    phases = {}
    for phase in columns(run):
        passing = [*(host_publish_items(run, load) if phase == "publish" else ())]
        phases[phase] = (*always, *passing, *_page_cache(run, load, saved=phase == "save"))
    return MemoryTable(
        kind="host",
        load=load.title,
        count=count,
        phases=phases,
        available_bytes=available_bytes,
        reclaimable=("page cache",),
    )


def _processes(run: PlannedRun, load: NodeLoad) -> list[MemoryItem]:
    engine_processes = ENGINE_PROCESS_BYTES * (load.num_engines + load.num_engine_ranks) // 2
    items = [
        MemoryItem(
            what="trainer processes",
            num_bytes=load.num_trainers * (TRAINER_PROCESS_BYTES + GPU_PROCESS_BYTES),
            knob="trainer.parallel.data",
        ),
        MemoryItem(
            what="engine processes",
            num_bytes=engine_processes + load.num_engine_ranks * GPU_PROCESS_BYTES,
            knob="engine.num_engines",
        ),
        MemoryItem(what="Ray", num_bytes=RAY_BYTES, knob=""),
        MemoryItem(
            what="object store",
            num_bytes=run.config.cluster.object_store_bytes,
            knob="cluster.object_store_bytes",
        ),
    ]
    if load.is_first:
        items += [
            MemoryItem(what="controller", num_bytes=CONTROLLER_BYTES, knob=""),
            MemoryItem(
                what="lengths of responses", num_bytes=book_bytes(run.config, run.num_prompts), knob="num_steps"
            ),
            MemoryItem(what="text actor", num_bytes=TOKENIZER_PROCESS_BYTES, knob=""),
        ]
    workers = load.num_scorers * run.config.reward.num_workers * REWARD_WORKER_BYTES
    items += [
        MemoryItem(what="scorers", num_bytes=load.num_scorers * TOKENIZER_PROCESS_BYTES, knob="reward.num_scorers"),
        MemoryItem(what="reward workers", num_bytes=workers, knob="reward.num_workers"),
    ]
    return [item for item in items if item.num_bytes]


def book_bytes(config: RunConfig, num_prompts: int) -> int:
    """Bytes of the lengths that the controller keeps for forecasts (`history.lengths.book`).

    Every group of the run is a visit. The book keeps the last visits of each prompt only, but the number of prompts may
    be unknown (0).
    """
    num_visits = config.num_steps * config.algorithm.max_groups
    if num_prompts:
        num_visits = min(num_visits, KEPT_VISITS * num_prompts)
    return most_bytes(num_visits=num_visits, visit_responses=config.algorithm.group_size)


def history_items(run: PlannedRun, load: NodeLoad) -> list[MemoryItem]:
    """The smaller of the budget and all responses of the run; segments of the current step and of the next one.

    A reader publishes the segments that engines of its node use. Plans give all engines about equally many tokens.
    """
    config = run.config
    if not load.num_shards and not load.num_readers:
        return []
    num_responses = config.algorithm.max_groups * config.algorithm.group_size
    step_tokens = num_responses * config.sampling.max_response_tokens
    run_bytes = config.num_steps * (4 * step_tokens + RESPONSE_BYTES * num_responses)
    stored = min(run_bytes, config.history.budget_bytes) * load.num_shards // max(run.placement.num_history_shards, 1)
    share = _all_segments(config) * load.num_engines // len(run.placement.engines)
    segments = load.num_readers * min(share, segment_budget(config))
    processes = (load.num_shards + load.num_readers) * HISTORY_PROCESS_BYTES
    items = [
        MemoryItem(what="history", num_bytes=stored, knob="history.budget_bytes"),
        MemoryItem(what="history segments", num_bytes=segments, knob="history.shm_bytes"),
        MemoryItem(what="history processes", num_bytes=processes, knob="history.num_shards"),
    ]
    return [item for item in items if item.num_bytes]


def segment_budget(config: RunConfig) -> int:
    """Upper bound of the history's segments on a node: all responses of two steps at full length, if none is set."""
    return config.history.shm_bytes or _all_segments(config)


def _all_segments(config: RunConfig) -> int:
    num_responses = config.algorithm.group_size * config.history.kept_steps
    prompt_bytes = SEGMENT_TOKEN_BYTES * num_responses * config.sampling.max_response_tokens
    return 2 * config.algorithm.max_groups * (prompt_bytes + SEGMENT_FILE_BYTES)


def _pinned(run: PlannedRun, load: NodeLoad) -> list[MemoryItem]:
    engine = run.config.engine
    items = []
    if load.num_trainers and (storages := _offloaded(run)):
        pinned = load.num_trainers * pinned_bytes(storages)
        knob = "trainer.optimizer.states_on_host" if run.config.trainer.offload == "none" else "trainer.offload"
        items.append(MemoryItem(what="pinned offload", num_bytes=pinned, knob=knob))
    if engine.sleep_level == 1 and load.num_engine_ranks:
        sleeping = load.num_engine_ranks * run.publish_bytes // engine.tensor_parallel
        items.append(
            MemoryItem(what="sleeping weights", num_bytes=int(SLEEP_ROUNDING * sleeping), knob="engine.sleep_level")
        )
    return items


def _offloaded(run: PlannedRun) -> tuple[int, ...]:
    """Bytes of each storage that a trainer rank copies to pinned memory at some time."""
    trainer, critic = run.config.trainer, _largest_critic(run)
    if trainer.offload == "none":
        storages = largest_state(run.spec, run.config.trainer).optimizer if trainer.optimizer.states_on_host else ()
        hosted = critic is not None and trainer.critic.optimizer.states_on_host
        return storages + (critic.optimizer if critic is not None and hosted else ())
    state = largest_state(run.spec, run.config.trainer)
    weights = state.weight_storages if trainer.offload == "all" else ()
    return state.optimizer + weights + _further_storages(run)


def reference_copies(run: PlannedRun, load: NodeLoad, *, pinned: bool) -> Sequence[MemoryItem]:
    """Weights of the reference policy in host memory."""
    trainer, reference = run.config.trainer, run.further.reference
    if reference is None or trainer.reference.place != "host" or not load.num_trainers:
        return []
    storages = largest_state(run.spec, run.config.trainer).weight_storages
    num_bytes = load.num_trainers * (pinned_bytes(storages) if pinned else sum(storages))
    return [MemoryItem(what="reference copies", num_bytes=num_bytes, knob="trainer.reference.place")]


def _further_storages(run: PlannedRun) -> tuple[int, ...]:
    """Bytes of each storage of further models that moves to the host with the optimizer."""
    critic = _largest_critic(run)
    storages = () if critic is None else critic.optimizer + critic.weight_storages
    if run.further.reference is not None and run.config.trainer.reference.place == "device":
        storages += largest_state(run.spec, run.config.trainer).weight_storages
    return storages


def largest_state(spec: ModelSpec, trainer: TrainerConfig) -> StateSizes:
    """State of the pipeline stage with most bytes."""
    stages = [rank_state(spec, trainer, pipeline_rank=rank) for rank in range(trainer.parallel.pipeline)]
    return max(stages, key=lambda state: state.total)


def _largest_critic(run: PlannedRun) -> StateSizes | None:
    """The same of the critic; None if there is none."""
    trainer, spec = run.config.trainer, run.further.critic
    if spec is None:
        return None
    stages = [critic_state(spec, trainer, pipeline_rank=rank) for rank in range(trainer.parallel.pipeline)]
    return max(stages, key=lambda state: state.total)


def pinned_bytes(storages: Sequence[int]) -> int:
    """Bytes of pinned copies of storages of so many bytes."""
    return sum(1 << (num_bytes - 1).bit_length() for num_bytes in storages)


def checkpoint_copies(run: PlannedRun, load: NodeLoad) -> Sequence[MemoryItem]:
    """Each replica of a parameter is written by one data-parallel rank, so ranks copy equal parts.

    Experts have fewer replicas; the parts of all parameters are estimated with theirs.
    """
    trainer, state, critic = run.config.trainer, largest_state(run.spec, run.config.trainer), _largest_critic(run)
    if not run.config.checkpoint.background or not load.num_trainers:
        return []
    num_replicas = trainer.parallel.data // trainer.parallel.expert
    copied = _copied(state, trainer.optimizer, num_replicas)
    if critic is not None:
        copied += _copied(critic, trainer.critic.optimizer, num_replicas)
    if run.further.reference is not None and trainer.reference.refresh_every:
        copied += -(-state.parameters // num_replicas)
    copied *= load.num_trainers
    return [MemoryItem(what="checkpoint copies", num_bytes=copied, knob="checkpoint.background")]


def _copied(state: StateSizes, optimizer: OptimizerConfig, num_replicas: int) -> int:
    """Bytes that one rank copies of a model that learns."""
    replicated = state.parameters + (0 if optimizer.distributed else state.optimizer_bytes)
    own = state.optimizer_bytes if optimizer.distributed else 0
    return own + -(-replicated // num_replicas)


def _page_cache(run: PlannedRun, load: NodeLoad, *, saved: bool) -> Sequence[MemoryItem]:
    """Files that a node reads and writes: the model, which every trainer rank reads, and its share of a checkpoint."""
    if not load.num_trainers:
        return []
    share = (
        checkpoint_bytes(run.spec, run.config.trainer, run.further)
        * load.num_trainers
        // run.config.trainer.parallel.world_size
        if saved
        else 0
    )
    return [MemoryItem(what="page cache", num_bytes=2 * num_parameters(run.spec) + share, knob="checkpoint.every")]
