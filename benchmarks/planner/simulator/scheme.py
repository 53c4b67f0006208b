"""Setting of a simulated run: the cluster, the scheme, and the product's planner set up for both."""

from dataclasses import dataclass

from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.workload import MAX_TOKENS, Workload
from history.lengths.estimate import LengthEstimate
from rollout.planning.admission import FixedBatches, FlexibleBatches
from rollout.planning.migration import MigrationRule
from rollout.planning.plan import GroupForecast
from rollout.tracing.engine_speed import EngineSpeed
from rollout.types import GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Engines and trainer of a simulated run."""

    num_engines: int
    num_slots: int
    """Responses that an engine runs at a time."""
    speed: Speed
    train_s_per_token: float = 0.0
    train_s: tuple[float, ...] = ()
    """Training time of each step; empty: `train_s_per_token` applies."""
    publish_s: float = 2.0
    """Engines pause for this time at every publish."""
    is_colocated: bool = False
    """Engines pause while the trainer trains."""

    def step_train_s(self, step: int, num_tokens: float) -> float:
        """Training time of a step whose batch has `num_tokens` response tokens."""
        return self.train_s[step] if self.train_s else self.train_s_per_token * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """Planner settings of a run."""

    policy: str
    overlap: int = 0
    head_start: float = 0.0
    max_staleness: int = 0
    migration: bool = False
    tail_share: float = 0.0
    """Share of the engines that is reserved for the longest groups."""


def admission_of(workload: Workload, scheme: Scheme) -> FixedBatches | FlexibleBatches:
    """The product's admission of a workload under a scheme."""
    group_size = workload.lengths.shape[1]

    def draw(step: int) -> list[GroupForecast]:
        first = step * workload.groups_per_step
        return [
            GroupForecast(group_id=GroupId(p), step=step, num_responses=group_size, tokens=float(workload.forecasts[p]))
            for p in range(first, first + workload.groups_per_step)
        ]

    if scheme.policy == "flexible":
        return FlexibleBatches(
            draw=draw,
            num_steps=workload.num_steps,
            groups_per_step=workload.groups_per_step,
            overlap=scheme.overlap,
            max_staleness=scheme.max_staleness,
        )
    return FixedBatches(draw=draw, num_steps=workload.num_steps, overlap=scheme.overlap, head_start=scheme.head_start)


def migration_rule(workload: Workload, cluster: Cluster) -> MigrationRule:
    """The product's migration rule with the simulated engines' speed and the workload's forecasts."""
    speed, forecasts = cluster.speed, workload.forecasts
    token_s = float(speed.fixed_s[2] - speed.fixed_s[1])
    engine_speed = EngineSpeed(
        fixed_s=float(speed.fixed_s[1]) - token_s,
        token_s=token_s,
        context_s=speed.context_s,
        saturated_requests=cluster.num_slots,
    )

    def remaining(group: GroupId, emitted: int) -> float:
        expected = LengthEstimate.of([], prior_mean=float(forecasts[group])).remaining(emitted)
        return min(expected, MAX_TOKENS - emitted)

    return MigrationRule(remaining=remaining, speed=lambda: engine_speed)
