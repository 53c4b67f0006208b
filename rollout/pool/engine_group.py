"""Typed calls to all engines of a run at once, with a deadline.

A call carries the number of each called engine, so an error names the right engine even if others are lost meanwhile.
`rollout.pool.living_engines` knows which engines can be called.
"""

import logging
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Literal

import numpy as np
import ray

from history.drafting.stats import DraftStats
from history.ray_wait import wait_for_all
from rollout.built_model import BuiltModel
from rollout.engine.state import EngineProof, EngineState, UpdateTimes
from rollout.failures import CallError, DeadlineError, Place, ProcessLostError
from rollout.pool.engine_call import Answer, EngineCall, answer_of, on_machines
from rollout.pool.living_engines import LivingEngines
from rollout.processes import ProcessId
from rollout.tracing.forwards import Forwards
from rollout.transports.base import Channel
from rollout.types import GroupId
from rollout.weights.announcement import SentPlan
from rollout.weights.fingerprint_sums import Fingerprint, Lenience
from rollout.weights.manifest import Required, WeightManifest

_log = logging.getLogger(__name__)


class EngineGroup(LivingEngines):
    """All engines of a run, called at once; errors name the engine.

    Answers are by engine number, ascending; lost engines are not called. Every call raises the errors of `wait`.
    """

    def __init__(
        self, actors: Sequence[ray.actor.ActorHandle], *, num_ranks: int, hosts: Sequence[str] = (), first: int = 0
    ) -> None:
        """`actors` are `rollout.engine.actor.EngineActor` handles, each with `num_ranks` ranks.

        `hosts` and `first` as in `LivingEngines`.
        """
        super().__init__(actors, hosts=hosts, first=first)
        self._plan = SentPlan()
        self.num_ranks = num_ranks

    def replace(self, number: int, engines: LivingEngines) -> None:
        """See `LivingEngines.replace`; the new engine holds no plan of publishes."""
        super().replace(number, engines)
        self._plan.forget(number)

    def wait(self, call: EngineCall[Answer], *, timeout_s: float) -> dict[int, Answer]:
        """Answers of a call by engine number, ascending.

        Raises:
            CallError: an engine raised, or answered with another type than the call's.
            ProcessLostError: an engine's process ended.
            DeadlineError: an engine had not finished after `timeout_s`.
        """
        numbers = {ref: number for number, ref in call.refs.items()}
        if not numbers:
            return {}
        done, late = wait_for_all(list(numbers), timeout_s=timeout_s, fetch_local=False)
        answers = {numbers[ref]: answer_of(call, numbers[ref], first=self._first) for ref in done}
        if late:
            hosts = [host for number in sorted(numbers[ref] for ref in late) if (host := self.host_of(number))]
            late_engines = sorted(self._first + numbers[ref] for ref in late)
            raise DeadlineError(
                f"engine(s) {late_engines}{on_machines(hosts)} had not finished `{call.method}` after {timeout_s:.0f} "
                "s; the controller waited for them",
                Place(role="engine", ranks=tuple(late_engines), node=hosts[0] if hosts else ""),
            )
        return dict(sorted(answers.items()))

    def begin_start(self) -> EngineCall[ProcessId]:
        """Start vLLM in every engine."""
        return self._begin("start", ProcessId)

    def finish_start(self, call: EngineCall[ProcessId], *, timeout_s: float) -> None:
        """Wait until every engine has started.

        Raises:
            ProcessLostError: an engine has started and was lost since, for example in its first sleep.
        """
        started = self.wait(call, timeout_s=timeout_s)
        self._processes.update(started)
        if self._lost:
            number = self.lost[0]
            place = Place(role="engine", ranks=(self._first + number,), node=self.host_of(number))
            raise ProcessLostError(f"engine {place.ranks[0]} was lost after its start: {self._lost[number]}", place)

    def sleep(self, *, timeout_s: float) -> None:
        """Engines release the memory of weights, keys and values; dead engines become lost, and late ones are ended.

        It returns when the processes of lost engines have ended, too, so that they hold no device memory.
        """
        self._call_living("sleep", timeout_s=timeout_s, asks_ranks=True)
        self.end_lost()

    def wake(self, part: Literal["weights", "kv_cache"], *, timeout_s: float) -> None:
        """Engines allocate the memory of one part again; dead engines become lost, and late ones are ended."""
        self._call_living("wake", part, timeout_s=timeout_s, asks_ranks=True)

    def pause_sampling(self, *, timeout_s: float) -> None:
        """Engines stop sampling until `resume_sampling` and keep their responses; dead engines become lost."""
        self._call_living("pause_sampling", timeout_s=timeout_s)

    def resume_sampling(self, *, timeout_s: float) -> None:
        """Engines sample again; dead engines become lost."""
        self._call_living("resume_sampling", timeout_s=timeout_s)

    def hold(self, *, timeout_s: float) -> None:
        """Engines hold new groups until `release`; dead engines become lost, and late ones are ended."""
        self._call_living("hold", timeout_s=timeout_s)

    def release(self, group_ids: Sequence[GroupId], *, timeout_s: float) -> None:
        """Engines wait for these groups, then begin them in this order; dead engines become lost."""
        self._call_living("release", list(group_ids), timeout_s=timeout_s)

    def start_over(self, *, timeout_s: float) -> None:
        """Engines forget their weights and await a publish of any version; dead engines become lost.

        Call it while they have no responses.
        """
        self._call_living("start_over", timeout_s=timeout_s)

    def required(self, *, timeout_s: float) -> list[Required]:
        """The parts of a publish that each rank of an engine receives.

        Raises:
            ProcessLostError: no engine is left.
            RuntimeError: engines differ, so that one plan cannot serve them all.
        """
        answers = self.wait(self._begin("required", list), timeout_s=timeout_s)
        if not answers:
            why = "; ".join(self._lost.values())
            raise ProcessLostError(f"no engine is left to publish to: {why}", Place(role="engine", ranks=self.lost))
        first, required = next(iter(answers.items()))
        for number, other in answers.items():
            if other != required:
                raise RuntimeError(f"engine {number} takes other parts of the weights than engine {first}")
        return list(required)

    def built_models(self, *, timeout_s: float) -> dict[int, BuiltModel]:
        """The model that each engine has built."""
        return self.wait(self._begin("built_model", BuiltModel), timeout_s=timeout_s)

    def node_ids(self, *, timeout_s: float) -> dict[int, str]:
        """Ray's id of the node of each engine."""
        return self.wait(self._begin("node_id", str), timeout_s=timeout_s)

    def begin_init_transport(self, channels: Mapping[int, Channel]) -> EngineCall[None]:
        """Join each engine to the channel given under its number."""
        calls = {number: (channel,) for number, channel in channels.items()}
        return self._begin_each("init_transport", NoneType, calls)

    def check(self, manifest: WeightManifest, *, timeout_s: float) -> None:
        """Every engine checks the metadata of a publish, and raises if it refuses.

        The manifest travels to engines that do not hold its plan; the others are told the version.
        """
        announced = self._plan.announce(manifest)
        lacking = self._plan.lacking(self.alive)
        shared = ray.put(manifest) if lacking else None  # pickled once for all of them
        calls = {number: (announced, shared) if number in lacking else (announced,) for number in self.alive}
        self.wait(self._begin_each("check", NoneType, calls), timeout_s=timeout_s)
        self._plan.given(lacking)

    def drain(self, *, timeout_s: float) -> None:
        """Engines finish the responses that are in flight."""
        self.wait(self._begin("drain", NoneType), timeout_s=timeout_s)

    def begin_update(
        self, manifest: WeightManifest, addresses: Mapping[int, Mapping[int, str]], *, with_sums: bool = True
    ) -> EngineCall[UpdateTimes]:
        """Apply a publish that was checked; `addresses` are by engine, then in the form of its transport."""
        announced = self._plan.announce(manifest)
        calls = {number: (announced, dict(of_engine), with_sums) for number, of_engine in addresses.items()}
        return self._begin_each("update", UpdateTimes, calls)

    def prove(
        self, expected: Fingerprint, lenience: Lenience, token_ids: Sequence[int], *, timeout_s: float
    ) -> dict[int, EngineProof]:
        """Every engine compares its sums with the expected ones, and computes log-probabilities of the probe prompt."""
        proving = self._begin("prove", EngineProof, ray.put(expected), lenience, list(token_ids))
        return self.wait(proving, timeout_s=timeout_s)

    def begin_probe(self, token_ids: Sequence[int]) -> EngineCall[list[float]]:
        """Log-probabilities of a prompt in each engine."""
        return self._begin("probe", list, list(token_ids))

    def resume(self, *, timeout_s: float) -> None:
        """Engines serve the weights that the probe has verified; dead engines become lost, and late ones are ended.

        It is the last call of a publish: the others serve these weights already, and would refuse them a second time.
        """
        self._measure(self._begin("resume", NoneType), timeout_s=timeout_s, ends_late=True)

    def fence(self, faults: Mapping[int, str], *, timeout_s: float) -> None:
        """The given engines stop sampling until the next publish, because of the fault under their number."""
        call = self._begin_each("fence", NoneType, {number: (fault,) for number, fault in faults.items()})
        self.wait(call, timeout_s=timeout_s)

    def connect_history(self, shards: Sequence[ray.actor.ActorHandle], *, timeout_s: float) -> None:
        """Engines send finished responses to these shards from now on."""
        self.wait(self._begin("connect_history", NoneType, shards), timeout_s=timeout_s)

    def reset_draft_stats(self, *, keeps_requests: bool) -> None:
        """Let each engine count drafts from 0, and requests too unless it `keeps_requests`; does not wait."""
        self._begin("draft_stats", DraftStats, keeps_requests)

    def history_figures(self, *, timeout_s: float) -> dict[int, tuple[DraftStats, int]]:
        """See `EngineActor.history_figures`; without engines that have died or are late."""
        return self._measure(self._begin("history_figures", tuple), timeout_s=timeout_s)

    def drain_trace(self, *, timeout_s: float) -> dict[int, Forwards]:
        """Each engine's forwards since the last call; without engines that have died or are late."""
        return self._measure(self._begin("drain_trace", np.ndarray), timeout_s=timeout_s)

    def states(self, *, timeout_s: float) -> dict[int, EngineState]:
        """The state of each engine."""
        return self.wait(self._begin("state", EngineState), timeout_s=timeout_s)

    def kernel_classes(self, *, timeout_s: float) -> dict[int, dict[str, str]]:
        """Matrix-product kernel of each layer of each engine."""
        return self.wait(self._begin("kernel_classes", dict), timeout_s=timeout_s)

    def kernel_notes(self, *, timeout_s: float) -> dict[int, list[str]]:
        """Messages of each engine about its kernels."""
        return self.wait(self._begin("kernel_notes", list), timeout_s=timeout_s)

    def _begin(self, method: str, kind: type[Answer], *args: object) -> EngineCall[Answer]:
        """Start a call with the same arguments on every engine that is alive."""
        return self._begin_each(method, kind, dict.fromkeys(self.alive, args))

    def _begin_each(
        self, method: str, kind: type[Answer], args: Mapping[int, tuple[object, ...]]
    ) -> EngineCall[Answer]:
        """Start a call on the given engines, each with its own arguments."""
        refs = {number: getattr(self._actors[number], method).remote(*given) for number, given in args.items()}
        return EngineCall(method=method, kind=kind, refs=refs)

    def _measure(self, call: EngineCall[Answer], *, timeout_s: float, ends_late: bool = False) -> dict[int, Answer]:
        """Answers of engines that live: a figure is no reason to end a run. Engines that have died become lost.

        Late engines are left out: vLLM's ranks answer after their forward, and a long prefill is no hang (decision 46).
        With `ends_late` they are ended.
        """
        numbers = {ref: number for number, ref in call.refs.items()}
        done, late = wait_for_all(list(numbers), timeout_s=timeout_s)
        answers = {}
        for ref in done:
            try:
                answers[numbers[ref]] = answer_of(call, numbers[ref], first=self._first)
            except ProcessLostError as error:
                self.mark_lost(numbers[ref], str(error))
            except CallError:  # perhaps vLLM's process has died, and the engine's process could say so
                self.check_alive(timeout_s=timeout_s)
                if numbers[ref] in self.alive:
                    raise
        for number in sorted(numbers[ref] for ref in late):
            why = f"had not finished `{call.method}` after {timeout_s:.0f} s"
            if ends_late:
                self.end_hung(number, why)
            else:
                at = on_machines([host] if (host := self.host_of(number)) else [])
                _log.warning("engine %d%s %s; its answer is left out", self._first + number, at, why)
        return dict(sorted(answers.items()))

    def _call_living(self, method: str, *args: object, timeout_s: float, asks_ranks: bool = False) -> None:
        """Call every engine; an engine that dies meanwhile or does not answer becomes lost, which is no error.

        After a death the others are called again. `asks_ranks`: after an error without a death all ranks must answer.
        Ask only while no engine samples.
        """
        try:
            self.wait(self._begin(method, NoneType, *args), timeout_s=timeout_s)
        except DeadlineError as error:
            for number in error.place.ranks:
                self.end_hung(number - self._first, f"had not finished `{method}` after {timeout_s:.0f} s")
        except RuntimeError:
            before = self.lost
            self.check_alive(timeout_s=timeout_s)
            if self.lost == before and asks_ranks:
                self.end_silent(timeout_s=timeout_s)
            if self.lost == before:
                raise
            self._call_living(method, *args, timeout_s=timeout_s, asks_ranks=asks_ranks)
