"""Assigns the processes of a run to nodes and devices: a pure function of the configuration and the nodes.

Colocated: trainer and engines share cores (they work in turns) or devices. Trainer rank N of a node reserves
`trainer_gpu_fraction` of the node's GPU N; the engine ranks on a GPU share the rest of it. Disaggregated: engines have
devices, or nodes, of their own. `launcher.cluster.node_assignment` has the order of nodes, and
`launcher.cluster.node_shares` the number of processes on each.

The controller and the text actor are on the first node. Scorers and history shards take the nodes in turn, and each
node with an engine has a reader.

Invariants: engine ids are 0..n-1; trainer ranks are 0..world-1; the fractions on a device sum to at most 1.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from history.types import HistoryPlaces
from launcher.cluster import weight_route
from launcher.cluster.node import NodeResources
from launcher.cluster.node_assignment import NodeUse, place_engines, place_trainer, unused
from launcher.cluster.node_shares import engine_counts, shared_devices, trainer_groups, trainer_nodes
from launcher.cluster.weight_route import Transport
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.config import TrainerConfig
from megatron_rl.ranks import TrainerRank
from rollout.config import EngineConfig
from rollout.types import EngineSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The processes of one run on the nodes."""

    nodes: tuple[str, ...]
    """Names of the nodes that the run uses, in order of placement; the first has the controller and the text actor."""
    trainers: tuple[TrainerRank, ...]
    engines: tuple[EngineSlot, ...]
    num_scorers: int
    num_history_shards: int
    """Processes that own the history; each node with an engine has one reader besides. 0 if no engine drafts."""
    transport: Transport
    """Transport of weights to the engines."""
    notes: tuple[str, ...]
    """Sentences about settings that work, but slowly."""
    declines_delta: bool = False
    """Whether `publish.delta` is not used, because it would be slower than full publishes."""
    retired: tuple[int, ...] = ()
    """Numbers of engines that were given up with their node, ascending. Their slots name that node."""

    @property
    def num_actors(self) -> int:
        """Ray actors of the run that reserve a logical CPU; history actors reserve none."""
        return len(self.trainers) + len(self.engines) + len(self.scorers) + 1

    @property
    def num_actors_on(self) -> dict[str, int]:
        """The same by node."""
        return dict(Counter([self.nodes[0], *self.scorers, *self._slot_nodes]))

    @property
    def scorers(self) -> tuple[str, ...]:
        """The node of each scorer."""
        return in_turn(self.num_scorers, self.nodes)

    @property
    def serving(self) -> tuple[EngineSlot, ...]:
        """Slots of the engines that were not given up."""
        return tuple(slot for slot in self.engines if slot.engine_id not in self.retired)

    @property
    def spans_nodes(self) -> bool:
        """Whether trainer ranks and engines are on more than one node."""
        return len(set(self._slot_nodes)) > 1

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """By engine and rank, the trainer rank that hands weights over; see `weight_route.homes`."""
        homes: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(self.engines)), ())
        slots = self.serving
        homes |= {
            slot.engine_id: home for slot, home in zip(slots, weight_route.homes(self.trainers, slots), strict=True)
        }
        return tuple(homes.values())

    @property
    def history(self) -> HistoryPlaces:
        """Nodes of the history's actors: shards take the nodes in turn, and each node with an engine has a reader."""
        with_engine = {slot.node for slot in self.serving} if self.num_history_shards else set()
        return HistoryPlaces(
            shards=in_turn(self.num_history_shards, self.nodes),
            readers=tuple(node for node in self.nodes if node in with_engine),
        )

    def lines(self) -> list[str]:
        """One line of text per slot, by node if there are several."""
        places = []
        for node in self.nodes:
            slots = self._trainer_lines(node) + self._engine_lines(node)
            if len(self.nodes) == 1:
                places += slots
            elif slots:
                places += [f"{node}:", *(f"  {line}" for line in slots)]
        readers = len(self.history.readers)
        history = f"history: {self.num_history_shards} shard(s) and {readers} reader{'s' * (readers != 1)}"
        scorers = f"scorers: {self.num_scorers} process(es)"
        on = ", ".join(dict.fromkeys(self.scorers))
        return [
            *places,
            f"weights: by {self.transport}",
            scorers if len(self.nodes) == 1 else f"controller on {self.nodes[0]}, {scorers} on {on}",
            *([history] if self.num_history_shards else []),
            *self.notes,
        ]

    @property
    def _slot_nodes(self) -> list[str]:
        return [*(rank.node for rank in self.trainers), *(slot.node for slot in self.serving)]

    def _trainer_lines(self, node: str) -> list[str]:
        return [
            f"trainer {slot.rank}: tp {slot.tensor_rank} pp {slot.pipeline_rank} dp {slot.data_rank}, "
            + (f"{slot.num_gpus:g} GPU" if slot.num_gpus else f"{slot.cpu_threads} CPU thread(s)")
            + self._on(slot.devices)
            for slot in self.trainers
            if slot.node == node
        ]

    def _engine_lines(self, node: str) -> list[str]:
        return [
            f"engine {slot.engine_id}: {slot.num_ranks} rank(s), each "
            + (f"{slot.num_gpus:g} GPU" if slot.num_gpus else f"{slot.cpu_cores} CPU core(s)")
            + self._on(slot.devices)
            for slot in self.engines
            if slot.node == node
        ]

    def _on(self, devices: Sequence[int]) -> str:
        """Device numbers, which are not the numbers of ranks if there are several nodes."""
        return f", GPU {', '.join(map(str, devices))}" if devices and len(self.nodes) > 1 else ""


def plan(config: RunConfig, nodes: Sequence[NodeResources]) -> Placement:
    """The placement of `config` on `nodes`; the command runs on the first one.

    Raises:
        ConfigError: the nodes have fewer cores or devices than the processes need at one time, too few inside one node,
            or not the devices that the transport needs.
    """
    uses = unused(nodes)
    on_devices = uses[0].on_devices
    if not on_devices:
        _check_threads("engine.cpu_cores", config.engine.cpu_cores, nodes)
        _check_threads("trainer.cpu_threads", config.trainer.cpu_threads, nodes)
    groups = trainer_groups(config.trainer, trainer_nodes(config, uses))
    groups += [0] * (len(uses) - len(groups))
    apart = config.placement.mode == "disaggregated"
    share = (1.0 if apart else config.cluster.trainer_gpu_fraction) if on_devices else 0.0
    trainers, uses = place_trainer(config.trainer, uses, groups, num_gpus=share)
    engines, uses = place_engines(config.engine, uses, engine_counts(config, uses), beside_trainer=apart)
    engines = _with_shares(engines, 0.0 if apart else share)
    transport = weight_route.choose_transport(config, trainers, engines)
    declines_delta = weight_route.declines_delta(config, trainers, engines)
    declined = [weight_route.declined_delta(transport)] if declines_delta else []
    crowded = weight_route.detour(config, transport) if on_devices else _crowded(config, uses)
    used = tuple(use.node.name for n, use in enumerate(uses) if not n or use.num_trainers or use.num_engines)
    return Placement(
        nodes=used,
        trainers=trainers,
        engines=engines,
        num_scorers=config.reward.num_scorers,
        num_history_shards=config.history.shards_over(len(used)) if config.drafts else 0,
        transport=transport,
        notes=(*crowded, *declined, *_idle(config), *_unused(uses)),
        declines_delta=declines_delta,
    )


def in_turn(count: int, nodes: Sequence[str]) -> tuple[str, ...]:
    """The node of each of so many processes that take the nodes in turn."""
    return tuple(nodes[number % len(nodes)] for number in range(count))


def plan_sft(trainer: TrainerConfig, nodes: Sequence[NodeResources]) -> tuple[TrainerRank, ...]:
    """Trainer ranks of a warm start; errors as for `plan`."""
    uses = unused(nodes)
    groups = trainer_groups(trainer, uses)
    return place_trainer(trainer, uses, groups, num_gpus=1.0 if uses[0].on_devices else 0.0)[0]


def plan_evaluation(engine: EngineConfig, nodes: Sequence[NodeResources]) -> tuple[EngineSlot, ...]:
    """Engines without a trainer; errors as for `plan`."""
    uses = unused(nodes)
    return _with_shares(place_engines(engine, uses, shared_devices(engine, uses), beside_trainer=False)[0], 0.0)


def _with_shares(engines: Sequence[EngineSlot], trainer_share: float) -> tuple[EngineSlot, ...]:
    """Engines with an equal share, of what the trainer leaves of the device with the most engine ranks."""
    on_a_device = Counter((slot.node, device) for slot in engines for device in slot.devices)
    if not on_a_device:
        return tuple(engines)
    share = math.floor(1000 * (1 - trainer_share) / max(on_a_device.values())) / 1000
    return tuple(replace(slot, num_gpus=share) for slot in engines)


def _check_threads(key: str, threads: int, nodes: Sequence[NodeResources]) -> None:
    """Refuse an OpenMP pool with more threads than cores, which stalls."""
    smallest = min(nodes, key=lambda node: node.cpu_cores)
    if threads > smallest.cpu_cores:
        where = "this node" if len(nodes) == 1 else smallest.name
        raise ConfigError(
            f"`{key}` = {threads} threads in one process, but {where} has {smallest.cpu_cores} cores; lower it"
        )


def _crowded(config: RunConfig, uses: Sequence[NodeUse]) -> list[str]:
    """Compares threads with cores on each node: trainer and engines together if they work at the same time."""
    at_once = config.placement.mode == "disaggregated" and config.samples_ahead
    notes = []
    for use in uses:
        trainer = use.num_trainers * config.trainer.cpu_threads
        engines = use.num_engines * config.engine.tensor_parallel * config.engine.cpu_cores
        sides = {"trainer and engines": trainer + engines} if at_once else {"trainer": trainer, "engines": engines}
        over = [f"{side} {threads} threads" for side, threads in sides.items() if threads > use.size]
        where = f"{use.node.name}: " if len(uses) > 1 else ""
        notes += [f"{where}{' and '.join(over)} on {use.size} cores: expect waiting"] if over else []
    return notes


def _idle(config: RunConfig) -> list[str]:
    if config.placement.mode == "colocated" or config.samples_ahead:
        return []
    return [
        "placement.mode is disaggregated and no step is sampled ahead: engines idle while the trainer works, and the "
        "trainer idles while engines sample; set planner.overlap"
    ]


def _unused(uses: Sequence[NodeUse]) -> list[str]:
    """Names nodes that the run does not use."""
    names = [use.node.name for use in uses if not use.num_trainers and not use.num_engines]
    if not names:
        return []
    return [f"{', '.join(names)}: no trainer rank and no engine; raise trainer.parallel.data or engine.num_engines"]
