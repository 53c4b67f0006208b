"""All engines of a run, called at once and waited for with a deadline; the numbers of those that are lost.

Every call has a typed method. A call carries the number of each engine that it was made to, so that an error names
the engine in which it happened, whichever others are lost by then.

An engine is lost when its process, or vLLM's inside it, has ended. It is not called until another takes its place
(`replace`), under its number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Generic, Literal, TypeVar

import numpy as np
import ray

from history.drafting.stats import DraftStats
from rollout.engine.state import EngineState, UpdateTimes
from rollout.failures import CallError, DeadlineError, Place, ProcessLostError, brief, node_of
from rollout.tracing.forwards import Forwards
from rollout.transports.base import Channel
from rollout.weights.fingerprint_sums import Fingerprint
from rollout.weights.manifest import Required, WeightManifest

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall(Generic[Answer]):
    """A call that is under way on some engines; `EngineGroup.wait` returns its answers."""

    method: str
    kind: type[Answer]
    refs: Mapping[int, ray.ObjectRef]
    """By the number of the engine."""


class EngineGroup:
    """All engines of a run, called at once; errors name the engine. `lose` and `replace` mutate.

    Answers come by the number of the engine, ascending; lost engines are not called and have none. Every call may
    raise what `wait` raises.
    """

    def __init__(self, actors: Sequence[ray.actor.ActorHandle], *, num_ranks: int) -> None:
        """`actors` are `rollout.engine.actor.EngineActor` handles, each with `num_ranks` ranks."""
        self._actors = list(actors)
        self._lost: dict[int, str] = {}
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return len(self._actors)

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """By number, lost ones too."""
        return tuple(self._actors)

    @property
    def lost(self) -> tuple[int, ...]:
        """Numbers of engines that are not there, ascending."""
        return tuple(sorted(self._lost))

    @property
    def alive(self) -> tuple[int, ...]:
        """Numbers of the others."""
        return tuple(number for number in range(len(self._actors)) if number not in self._lost)

    def mark_lost(self, number: int, why: str) -> None:
        """An engine has died."""
        self._lost.setdefault(number, why)

    def loss_reason(self, number: int) -> str:
        """What an engine was lost of; empty for one that is there."""
        return self._lost.get(number, "")

    def replace(self, number: int, actor: ray.actor.ActorHandle) -> None:
        """Another one has taken its place."""
        self._actors[number] = actor
        self._lost.pop(number, None)

    def check_alive(self, *, timeout_s: float) -> None:
        """Ask every engine whether it and its vLLM are alive; those that are not are lost from now on.

        An engine that does not answer in time is not judged: whoever calls it next waits, and names it.
        """
        asking = {self._actors[number].fault.remote(): number for number in self.alive}
        done, _ = ray.wait(list(asking), num_returns=len(asking), timeout=timeout_s) if asking else ([], [])
        for ref in done:
            try:
                fault: str = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                fault = brief(error)
            if fault:
                self.mark_lost(asking[ref], fault)

    def wait(self, call: EngineCall[Answer], *, timeout_s: float) -> dict[int, Answer]:
        """Answers of a call by the number of the engine, ascending.

        Raises:
            CallError: an engine raised, or answered with another type than the call's.
            ProcessLostError: an engine's process ended.
            DeadlineError: an engine had not finished after `timeout_s`.
        """
        numbers = {ref: number for number, ref in call.refs.items()}
        if not numbers:
            return {}
        done, late = ray.wait(list(numbers), num_returns=len(numbers), timeout=timeout_s, fetch_local=False)
        answers = {numbers[ref]: _answer(call, numbers[ref]) for ref in done}
        if late:
            found = sorted(numbers[ref] for ref in late)
            raise DeadlineError(
                f"engine(s) {found} had not finished `{call.method}` after {timeout_s:.0f} s, for which the controller "
                "waited",
                Place(role="engine", ranks=tuple(found)),
            )
        return dict(sorted(answers.items()))

    def begin_start(self) -> EngineCall[None]:
        """Start vLLM in every engine."""
        return self._begin("start", NoneType)

    def sleep(self, *, timeout_s: float) -> None:
        """Engines give up the memory of weights, keys and values."""
        self.wait(self._begin("sleep", NoneType), timeout_s=timeout_s)

    def wake(self, what: Literal["weights", "kv_cache"], *, timeout_s: float) -> None:
        """Engines take that memory again."""
        self.wait(self._begin("wake", NoneType, what), timeout_s=timeout_s)

    def pause_sampling(self, *, timeout_s: float) -> None:
        """Engines sample nothing until `resume_sampling`, and keep what they have begun; one that has died is lost."""
        self._call_living("pause_sampling", timeout_s=timeout_s)

    def resume_sampling(self, *, timeout_s: float) -> None:
        """Engines sample again; one that has died is lost."""
        self._call_living("resume_sampling", timeout_s=timeout_s)

    def required(self, *, timeout_s: float) -> list[Required]:
        """What each rank of an engine takes of a publish.

        Raises:
            RuntimeError: engines differ in it, so that one plan cannot serve them all.
        """
        answers = self.wait(self._begin("required", list), timeout_s=timeout_s)
        first, required = next(iter(answers.items()))
        for number, other in answers.items():
            if other != required:
                raise RuntimeError(f"engine {number} takes other parts of the weights than engine {first}")
        return list(required)

    def node_ids(self, *, timeout_s: float) -> dict[int, str]:
        """Ray's name of the node that each engine is on."""
        return self.wait(self._begin("node_id", str), timeout_s=timeout_s)

    def begin_init_transport(self, channels: Mapping[int, Channel]) -> EngineCall[None]:
        """Join each engine to the channel that is named under its number."""
        return self._begin_each("init_transport", NoneType, {number: (one,) for number, one in channels.items()})

    def check(self, manifest: WeightManifest, *, timeout_s: float) -> None:
        """Every engine accepts the metadata of a publish, or refuses it."""
        self.wait(self._begin("check", NoneType, manifest), timeout_s=timeout_s)

    def drain(self, *, timeout_s: float) -> None:
        """Engines finish the responses that are in flight."""
        self.wait(self._begin("drain", NoneType), timeout_s=timeout_s)

    def begin_update(
        self, manifest: WeightManifest, addresses: Mapping[int, Mapping[int, str]]
    ) -> EngineCall[UpdateTimes]:
        """Apply a publish; `addresses` are by engine, then as its transport has them."""
        calls = {number: (manifest, dict(of_engine)) for number, of_engine in addresses.items()}
        return self._begin_each("update", UpdateTimes, calls)

    def begin_loaded_fingerprint(self) -> "EngineCall[Fingerprint]":
        """Fingerprint over all weights that each engine has loaded."""
        return self._begin("loaded_fingerprint", dict)

    def begin_probe(self, token_ids: Sequence[int]) -> EngineCall[list[float]]:
        """Log-probabilities of the probe prompt in each engine."""
        return self._begin("probe", list, list(token_ids))

    def resume(self, *, timeout_s: float) -> None:
        """Engines serve the weights that they have proven."""
        self.wait(self._begin("resume", NoneType), timeout_s=timeout_s)

    def fence(self, faults: Mapping[int, str], *, timeout_s: float) -> None:
        """The engines named sample nothing until the next publish, because of the fault under their number."""
        call = self._begin_each("fence", NoneType, {number: (fault,) for number, fault in faults.items()})
        self.wait(call, timeout_s=timeout_s)

    def connect_history(self, shards: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        """Engines send finished responses to these shards from now on."""
        self.wait(self._begin("connect_history", NoneType, shards), timeout_s=timeout_s)

    def begin_draft_stats(self) -> EngineCall[DraftStats]:
        """What each engine has drafted since it was asked last."""
        return self._begin("draft_stats", DraftStats)

    def lost_history_calls(self, *, timeout_s: float) -> dict[int, int]:
        """Batches of finished responses that no shard took, ever."""
        return self.wait(self._begin("lost_history_calls", int), timeout_s=timeout_s)

    def drain_trace(self, *, timeout_s: float) -> dict[int, Forwards]:
        """Each engine's forwards since it was asked last."""
        return self.wait(self._begin("drain_trace", np.ndarray), timeout_s=timeout_s)

    def states(self, *, timeout_s: float) -> dict[int, EngineState]:
        """The state of each engine."""
        return self.wait(self._begin("state", EngineState), timeout_s=timeout_s)

    def kernel_classes(self, *, timeout_s: float) -> dict[int, dict[str, str]]:
        """The kernel that multiplies in each layer of each engine."""
        return self.wait(self._begin("kernel_classes", dict), timeout_s=timeout_s)

    def kernel_notes(self, *, timeout_s: float) -> dict[int, list[str]]:
        """What each engine says of its kernels."""
        return self.wait(self._begin("kernel_notes", list), timeout_s=timeout_s)

    def _begin(self, method: str, kind: type[Answer], *args: object) -> EngineCall[Answer]:
        """Start a call with the same arguments on every engine that is there."""
        return self._begin_each(method, kind, dict.fromkeys(self.alive, args))

    def _begin_each(
        self, method: str, kind: type[Answer], args: Mapping[int, tuple[object, ...]]
    ) -> EngineCall[Answer]:
        """Start a call on the engines named, each with its own arguments."""
        refs = {number: getattr(self._actors[number], method).remote(*given) for number, given in args.items()}
        return EngineCall(method=method, kind=kind, refs=refs)

    def _call_living(self, method: str, *, timeout_s: float) -> None:
        """Call every engine; one that has died meanwhile is lost, which is no error."""
        try:
            self.wait(self._begin(method, NoneType), timeout_s=timeout_s)
        except RuntimeError:
            before = self.lost
            self.check_alive(timeout_s=timeout_s)
            if self.lost == before:
                raise
            self._call_living(method, timeout_s=timeout_s)


def _answer(call: EngineCall[Answer], number: int) -> Answer:
    """The answer of one engine, which has answered; errors name it."""
    try:
        answer = ray.get(call.refs[number])
    except ray.exceptions.RayError as error:
        kind = ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
        raise kind(
            f"engine {number}: {call.method} failed: {brief(error)}",
            Place(role="engine", ranks=(number,), node=node_of(error)),
        ) from error
    if not isinstance(answer, call.kind):
        raise CallError(
            f"engine {number}: {call.method} answered with {type(answer).__name__}, not {call.kind.__name__}",
            Place(role="engine", ranks=(number,)),
        )
    return answer
