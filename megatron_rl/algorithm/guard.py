"""Decides when a run whose sampler drifts from its trainer acts, and when it goes back. Pure.

After each step the guard sees the effective sample size of the importance weights, k3, and the tail of the log ratios.
A step is *bad* if one of them is beyond its bound, *healthy* if all keep a margin from their bounds, else *doubtful*.

    `patience` bad steps in a row           -> the next action of the ladder, one level up
    `recover_after` healthy steps in a row  -> the last action is taken back, one level down
    anything else                           -> nothing

The margin and the two counts are the hysteresis. A relapse, which is a step up right after a step down, doubles the
healthy steps that the next step down needs, at most `MOST_HOLD` times.

The ladder (`ladder`) orders actions by their cost: a tighter cap, more layers in BF16, less overlap, rollouts in BF16.
A level n has the first n actions in force. A state is saved with its actions, because a later start may have another
ladder.

Invariants (`check_actions`, asserted in every test): levels change by one; two changes are at least `patience` steps
apart; a change needs as many bad or healthy steps in a row as the rules ask; no level is beyond the ladder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, takewhile
from typing import Literal

from megatron_rl.guard_config import GuardConfig

MOST_HOLD = 8
"""Relapses lengthen the healthy period at most by this factor."""

Kind = Literal["cap", "bf16_layers", "overlap", "bf16_rollouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action of the ladder."""

    kind: Kind
    value: float
    """The cap; the number of further BF16 layers; the overlap; unused for `bf16_rollouts`."""

    @property
    def line(self) -> str:
        """The setting that this action makes."""
        match self.kind:
            case "cap":
                return f"correction.cap = {self.value:g}"
            case "bf16_layers":
                return f"{self.value:g} layer(s) with the worst SQNR in BF16"
            case "overlap":
                return f"planner.overlap = {self.value:g}"
            case "bf16_rollouts":
                return "engine.format = engine.kv_format = bf16"

    @property
    def restarts_engines(self) -> bool:
        """Whether engines must load the model anew, because a layer's format is fixed when vLLM builds it."""
        return self.kind in ("bf16_layers", "bf16_rollouts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a step showed."""

    ess: float
    """Effective sample size of the importance weights, a share; of the ratios in a run without correction."""
    k3: float
    """Nats per token."""
    tail: float
    """99.9 % quantile of the absolute log ratio, in nats."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> "Observation | None":
        """Of a step's metrics; None for a step that trained on nothing."""
        if "rollout_corr/k3_kl" not in metrics:
            return None
        ratios = metrics["rollout_corr/ratio_eff_sample_size"]
        return cls(
            ess=metrics.get("rollout_corr/rollout_is_eff_sample_size", ratios),
            k3=metrics["rollout_corr/k3_kl"],
            tail=metrics["rollout_corr/abs_log_ratio_p999"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardState:
    """Everything that the guard remembers; part of a checkpoint."""

    level: int = 0
    """Actions in force."""
    bad: int = 0
    """Bad steps in a row since the last action."""
    healthy: int = 0
    """Healthy steps in a row since the last action."""
    hold: int = 1
    """Factor of the healthy steps that a step down needs."""
    went_down: bool = False
    """Whether the last action was a step down."""
    num_actions: int = 0
    """Steps up and down since the run's first step."""
    is_advice: bool = False
    """Whether the actions were only advised."""
    layers: tuple[int, ...] = ()
    """Layers that `bf16_layers` has chosen, worst SQNR first; a lower level uses the first of them."""
    actions: tuple[Action, ...] | None = None
    """Those of the level. None: unknown, at level 0 or of a checkpoint of an earlier version."""

    def in_mode(self, mode: str) -> "GuardState":
        """This state if it was reached in that mode; else the first state, because advice has changed nothing."""
        is_advice = mode == "advise"
        return self if self.is_advice == is_advice else GuardState(is_advice=is_advice)

    def on_ladder(self, actions: Sequence[Action]) -> "GuardState":
        """This state at its level of a ladder: that up to which the ladder begins with the actions in force.

        A configuration that changes between two starts can change the ladder. The counts begin anew at a lower level.
        """
        if not self.level:
            return self
        known = actions[: self.level] if self.actions is None else self.actions
        level = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, actions, strict=False)))
        state = replace(self, level=level, actions=tuple(actions[:level]))
        return state if level == self.level else replace(state, bad=0, healthy=0)

    def to_json(self) -> dict[str, object]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: object) -> "GuardState":
        """Of a checkpoint; None is that of a version without a guard.

        Raises:
            ValueError: `row` is no saved state.
            KeyError: a part is missing.
        """
        if row is None:
            return cls()
        if not isinstance(row, dict) or not isinstance(layers := row["layers"], list | tuple):
            raise ValueError(f"guard: {row!r} is not a saved state")
        return cls(
            level=int(str(row["level"])),
            bad=int(str(row["bad"])),
            healthy=int(str(row["healthy"])),
            hold=int(str(row["hold"])),
            went_down=bool(row["went_down"]),
            num_actions=int(str(row["num_actions"])),
            is_advice=bool(row["is_advice"]),
            layers=tuple(layers),
            actions=_saved_actions(row.get("actions")),
        )


def _saved_actions(rows: object) -> tuple[Action, ...] | None:
    if not isinstance(rows, list | tuple):
        return None
    return tuple(Action(kind=row["kind"], value=float(row["value"])) for row in rows)


def verdict(seen: Observation, config: GuardConfig) -> Literal["bad", "healthy", "doubtful"]:
    """What a step shows. A value that is not a number is bad."""
    shares = (  # of the way from perfect agreement to the bound
        (1 - seen.ess) / (1 - config.min_ess),
        seen.k3 / config.max_k3,
        seen.tail / config.max_tail,
    )
    if not all(share <= 1 for share in shares):
        return "bad"
    return "healthy" if all(share <= config.margin for share in shares) else "doubtful"


def advance(state: GuardState, seen: Observation | None, config: GuardConfig, *, num_actions: int) -> GuardState:
    """The state after a step. `num_actions` is the length of the ladder; a step without tokens changes nothing."""
    if seen is None:
        return state
    found = verdict(seen, config)
    bad = state.bad + 1 if found == "bad" else 0
    healthy = state.healthy + 1 if found == "healthy" else 0
    if bad >= config.patience and state.level < num_actions:
        hold = min(2 * state.hold, MOST_HOLD) if state.went_down else state.hold
        return _moved(state, 1, hold=hold)
    if healthy >= config.recover_after * state.hold and state.level > 0:
        return _moved(state, -1, hold=state.hold)
    return replace(state, bad=bad, healthy=healthy)


def _moved(state: GuardState, by: int, *, hold: int) -> GuardState:
    return replace(
        state,
        level=state.level + by,
        bad=0,
        healthy=0,
        hold=hold,
        went_down=by < 0,
        num_actions=state.num_actions + 1,
    )


def reason(seen: Observation, config: GuardConfig) -> str:
    """The values of a step and their bounds."""
    return (
        f"ESS {seen.ess:.4f} (at least {config.min_ess:g}), k3 {seen.k3:.2e} (at most {config.max_k3:g}), "
        f"tail {seen.tail:.2f} (at most {config.max_tail:g})"
    )


def ladder(
    config: GuardConfig,
    *,
    cap: float | None,
    low: float = 0.0,
    layers_in_8_bits: int,
    kv_in_8_bits: bool,
    overlap: int,
) -> tuple[Action, ...]:
    """All actions of a run, cheapest first.

    Args:
        config: the guard's rules.
        cap: of the correction; None for a mode without one.
        low: lower end of the correction's band; 0 for a mode without one. A cap at or below it would keep nothing.
        layers_in_8_bits: decoder layers with 8-bit weights; 0 if all are BF16.
        kv_in_8_bits: whether engines hold keys and values in 8 bits.
        overlap: steps that are sampled ahead.
    """
    actions = [Action(kind="cap", value=value) for value in config.caps if cap is not None and low < value < cap]
    counts = sorted({math.ceil(share * layers_in_8_bits) for share in config.bf16_layers if layers_in_8_bits})
    actions += [Action(kind="bf16_layers", value=count) for count in counts if count < layers_in_8_bits]
    actions += [Action(kind="overlap", value=value) for value in reversed(range(overlap)) if config.lower_overlap]
    if (layers_in_8_bits or kv_in_8_bits) and config.bf16_rollouts:
        actions.append(Action(kind="bf16_rollouts", value=1))
    return tuple(actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The settings of a level. None and () leave the configuration as it is."""

    cap: float | None = None
    overlap: int | None = None
    layers: tuple[int, ...] = ()
    """Decoder layers in BF16, beside the configured ones."""
    bf16_rollouts: bool = False

    def same_format(self, other: "InForce") -> bool:
        """Whether engines of both levels hold their weights in the same formats."""
        return set(self.layers) == set(other.layers) and self.bf16_rollouts == other.bf16_rollouts


def in_force(actions: Sequence[Action], state: GuardState) -> InForce:
    """The settings of a state's level on its ladder (`GuardState.on_ladder`)."""
    values = {action.kind: action.value for action in actions[: state.level]}  # the last one of each kind
    return InForce(
        cap=values.get("cap"),
        overlap=int(values["overlap"]) if "overlap" in values else None,
        layers=state.layers[: int(values.get("bf16_layers", 0))],
        bf16_rollouts="bf16_rollouts" in values,
    )


def worst_layers(before: Sequence[int], sqnr_db: Mapping[int, float], count: int) -> tuple[int, ...]:
    """`count` layers for BF16: those chosen before, then the ones with the lowest measured SQNR."""
    rest = sorted((layer for layer in sqnr_db if layer not in before), key=lambda layer: (sqnr_db[layer], layer))
    return (*before, *rest)[:count] if count > len(before) else tuple(before)


def check_actions(levels: Sequence[int], verdicts: Sequence[str], config: GuardConfig, *, num_actions: int) -> None:
    """Assert the invariants; `levels` has the level before the first step, then the one after each step."""
    changes = [step for step in range(len(verdicts)) if levels[step] != levels[step + 1]]
    assert all(abs(levels[step + 1] - levels[step]) == 1 for step in changes), "a level was skipped"
    assert all(0 <= level <= num_actions for level in levels), "a level is beyond the ladder"
    assert all(b - a >= config.patience for a, b in pairwise(changes)), "two actions are too close"
    for step in changes:
        up = levels[step + 1] > levels[step]
        needed, kind = (config.patience, "bad") if up else (config.recover_after, "healthy")
        assert list(verdicts[max(step + 1 - needed, 0) : step + 1]) == [kind] * needed, "an action without cause"
