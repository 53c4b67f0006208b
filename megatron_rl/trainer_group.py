"""The controller's view of the trainer: typed calls on all ranks at once."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import ray

from megatron_rl.batching import TrainBatch
from megatron_rl.imitation import ImitationBatch
from megatron_rl.results import ProbeResult, StagedWeights, StepResult
from megatron_rl.slots import TrainerSlot
from megatron_rl.spmd import SpmdGroup
from megatron_rl.trainer_actor import TrainerActor
from megatron_rl.trainer_spec import TrainerSpec
from rollout.weight_sums import Sums
from rollout.wire import Wanted

if TYPE_CHECKING:
    from megatron_rl.host_copies import Part

Result = TypeVar("Result")


class TrainerGroup:
    """All trainer ranks of a run; errors of any call kill the group (see `SpmdGroup`)."""

    def __init__(self, ranks: SpmdGroup) -> None:
        self.ranks = ranks
        self._unstaging: Sequence[ray.ObjectRef] = ()

    def te_names(self) -> bool:
        """Whether the ranks' parameters bear Transformer Engine's names."""
        return _results(self.ranks.call("te_names"), bool)[0]

    def train(self, batch: TrainBatch) -> StepResult:
        """Train on one step's batch; the last rank reports (it is on the last pipeline stage)."""
        handle = ray.put(batch)
        return _results(self.ranks.call("train", handle), StepResult)[-1]

    def load_rows(self, rows: ray.ObjectRef) -> None:
        """Give every rank the rows of a warm start (an `ImitationRows` in the object store)."""
        self.ranks.call("load_rows", rows)

    def imitate(self, batch: ImitationBatch) -> StepResult:
        """One optimizer step of a warm start."""
        return _results(self.ranks.call("imitate", batch), StepResult)[-1]

    def open_stores(self, first_rank: int, num_engines: int, *, timeout_s: float) -> list[tuple[str, int]]:
        """Stores for gloo groups, one per engine, on the node of `first_rank`; (host, port) of each."""
        found = _results(self.ranks.call("open_stores", first_rank, num_engines, timeout_s), list)
        return list(found[first_rank])

    def plan_publishes(self, wanted: Sequence[Wanted]) -> None:
        """Tell every rank what the engines' ranks take."""
        self.ranks.call("plan_publishes", ray.put(list(wanted)))

    def stage(self, weight_version: int, *, timeout_s: float) -> list[StagedWeights]:
        """Quantise and stage a publish on every rank."""
        self.ranks.wait(self._unstaging, "unstage", timeout_s=timeout_s)
        return _results(self.ranks.call("stage", weight_version, timeout_s=timeout_s), StagedWeights)

    def unstage(self) -> None:
        """Have every rank let go of the staged publish ahead of whatever it is asked next; waits for none.

        What goes wrong there is raised by the next `stage`.
        """
        self._unstaging = self.ranks.begin("unstage")

    def sent_sums(self, *, timeout_s: float) -> list[Sums]:
        """Sums of what each rank published last."""
        return list(_results(self.ranks.call("sent_sums", timeout_s=timeout_s), dict))

    def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> ProbeResult:
        """Log-probabilities of the probe prompt under the weights as staged."""
        found = self.ranks.call("probe", list(token_ids), timeout_s=timeout_s)
        return _results([result for result in found if result is not None], ProbeResult)[0]

    def move_out(self, parts: "Sequence[Part]") -> None:
        """Move parts of every rank to host memory; see `HostCopies`."""
        self.ranks.call("move_out", tuple(parts))

    def move_in(self) -> None:
        """Bring back what every rank has in host memory."""
        self.ranks.call("move_in")

    def save(self, path: str) -> None:
        """Write the trainer's part of a checkpoint."""
        self.ranks.call("save", path)

    def load(self, path: str) -> None:
        """Restore the trainer's part of a checkpoint."""
        self.ranks.call("load", path)

    def export(self, path: str) -> None:
        """Write the policy as a Hugging Face directory."""
        self.ranks.call("export", path)

    def kill(self) -> None:
        """End every rank."""
        self.ranks.kill()


def start_trainer(
    spec: TrainerSpec, slots: Sequence[TrainerSlot], *, environments: Sequence[Mapping[str, str]]
) -> TrainerGroup:
    """Start one actor per slot in its own environment; returns when all have met and loaded their weights."""
    remote = ray.remote(TrainerActor)
    actors = [
        remote.options(
            num_cpus=1,
            num_gpus=0 if slot.devices else slot.num_gpus,
            runtime_env={"env_vars": dict(environment)},
        ).remote(spec, slot.rank)
        for slot, environment in zip(slots, environments, strict=True)
    ]
    ranks = SpmdGroup("trainer", actors, timeout_s=spec.config.timeout_s)
    (address, *_) = ranks.call("rendezvous")
    assert isinstance(address, tuple)
    ranks.call("join", *address)
    return TrainerGroup(ranks)


def _results(found: Sequence[object], kind: type[Result]) -> list[Result]:
    checked = [result for result in found if isinstance(result, kind)]
    assert len(checked) == len(found), f"a rank returned something else than {kind.__name__}"
    return checked
