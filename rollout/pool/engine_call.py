"""A call to some engines at once: its answers, and errors that name the engine.

`EngineQuestion` is a call to one engine that nobody waits for alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import ray

from rollout.failures import CallError, Place, ProcessLostError, brief, node_of

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall(Generic[Answer]):
    """A running call to some engines; `EngineGroup.wait` returns the answers."""

    method: str
    kind: type[Answer]
    refs: Mapping[int, ray.ObjectRef]
    """By engine number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQuestion:
    """A call to one engine; a pool waits for its answer beside those of all other calls."""

    engine: int
    incarnation: int
    """Of the engine (`EngineGroup.incarnations`): a call may fail after its engine was replaced."""
    method: str


def answer_of(call: EngineCall[Answer], number: int, *, first: int) -> Answer:
    """The answer of one engine whose call has ended; errors name the engine, counted from `first`.

    Raises:
        CallError: the engine raised, or answered with another type than the call's.
        ProcessLostError: the engine's process ended.
    """
    name = first + number
    try:
        answer = ray.get(call.refs[number])
    except ray.exceptions.RayError as error:
        kind = ProcessLostError if isinstance(error, ray.exceptions.RayActorError) else CallError
        raise kind(
            f"engine {name}: {call.method} failed: {brief(error)}",
            Place(role="engine", ranks=(name,), node=node_of(error)),
        ) from error
    if not isinstance(answer, call.kind):
        raise CallError(
            f"engine {name}: {call.method} answered with {type(answer).__name__}, not {call.kind.__name__}",
            Place(role="engine", ranks=(name,)),
        )
    return answer


def on_machines(hosts: Sequence[str]) -> str:
    """Machines in a message; empty if none is known."""
    if not hosts:
        return ""
    return f" on {hosts[0]}" + (" and others" if len(set(hosts)) > 1 else "")
