"""Starts the processes with the tokenizer: the text actor and the scorers. They load at the same time.

In a joined cluster the placement says on which node each one is. A scorer whose node is lost is restarted by Ray on
another one, because nothing binds it to devices; so it has no bundle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from history.ray_wait import wait_for_all
from rollout.config import RewardConfig
from rollout.data.tokenizer import TokenizerFacts, TokenizerSource
from rollout.failures import DeadlineError, Place
from rollout.pool.heartbeat import Heartbeat
from rollout.rewards.scorer_actor import ScorerActor
from rollout.rewards.text_actor import TextActor

LOAD_TIMEOUT_S = 600.0
"""Longest start of a process; a slower one is considered dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProcesses:
    """The text actor and the scorers, ready."""

    text_actor: ray.actor.ActorHandle
    scorers: tuple[ray.actor.ActorHandle, ...]
    tokenizer: TokenizerFacts

    @property
    def actors(self) -> tuple[ray.actor.ActorHandle, ...]:
        """All of them."""
        return (self.text_actor, *self.scorers)


def start_text_processes(
    tokenizer: TokenizerSource,
    config: RewardConfig,
    *,
    environments: Sequence[Mapping[str, str]],
    node_ids: Sequence[str],
    num_cpus: int,
    note: Callable[[ray.actor.ActorHandle], None],
) -> TextProcesses:
    """Start the text actor and the scorers, and wait until all have loaded.

    Args:
        tokenizer: where each of them loads it.
        config: of the scorers; its `max_restarts` is that of the text actor, too.
        environments: variables of the text actor, then of each scorer.
        node_ids: Ray's ids of their nodes; empty on the only node.
        num_cpus: logical CPUs of each.
        note: called with each actor as soon as it exists.

    Raises:
        ValueError: there is no tokenizer, it does not fit the model, or the reward function's path is bad.
        RewardBrokenError: the module of the reward function fails while it is imported.
        DeadlineError: one of them has not loaded in `LOAD_TIMEOUT_S`.
    """
    classes: list[ray.actor.ActorClass] = [TextActor, *[ScorerActor] * (len(environments) - 1)]
    actors = []
    for number, (actor_class, variables, node_id) in enumerate(zip(classes, environments, node_ids, strict=True)):
        placed = actor_class.options(
            num_cpus=num_cpus,
            max_restarts=config.max_restarts,
            runtime_env={"env_vars": dict(variables)},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else None,
            memory=1,  # Ray (2.60) ignores the preference of an actor that needs no resource at all
        )
        actors.append(placed.remote(tokenizer, config) if number else placed.remote(tokenizer))
        note(actors[-1])
    heartbeats = [Heartbeat(actor) for actor in actors]
    for heartbeat in heartbeats:
        heartbeat.ask()
    starting = [actor.start.remote() for actor in actors]
    done, _ = wait_for_all(starting, timeout_s=LOAD_TIMEOUT_S)
    late = [number - 1 for number, ref in enumerate(starting) if ref not in done]
    if late:
        heartbeat = heartbeats[late[0] + 1]
        heartbeat.ask()  # reads the answer to the first question
        role, number = ("scorer", late[0]) if late[0] >= 0 else ("text actor", 0)
        place = Place(role=role, ranks=(number,), node=heartbeat.host)
        raise DeadlineError(
            f"the controller waited {LOAD_TIMEOUT_S:.0f} s for {place} to load tokenizer and reward function", place
        )
    facts: TokenizerFacts = ray.get(starting)[0]
    return TextProcesses(text_actor=actors[0], scorers=tuple(actors[1:]), tokenizer=facts)
