"""The guard of a run: tells `megatron_rl.algorithm.guard` what a step showed, and keeps the settings in force.

In mode `advise` the levels are those that `act` would reach if actions had no effect, and no setting changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.algorithm.guard import (
    Action,
    GuardState,
    InForce,
    Observation,
    advance,
    in_force,
    reason,
    worst_layers,
)
from megatron_rl.controller.publish_report import PublishReport
from megatron_rl.guard_config import GuardConfig


class Guard:
    """Watches the steps of one controller."""

    def __init__(
        self, config: GuardConfig, actions: Sequence[Action], state: GuardState, *, report: Callable[[str], None]
    ) -> None:
        """`actions` is the run's ladder, and `state` that of the checkpoint. `report` records the line of an action.

        A state of another mode is not continued. One whose actions this ladder does not begin with goes on at a lower
        level, which is reported too.
        """
        self._config = config
        self._actions = tuple(actions)
        self._report = report
        state = state.in_mode(config.mode)
        self.state = state.on_ladder(self._actions)
        """Belongs to a checkpoint."""
        if self.state.level < state.level:
            self._report(self._lower_level(state))
        self._of_engines = self.in_force

    @property
    def in_force(self) -> InForce:
        """The settings of the present level."""
        return in_force(self._actions, self.state) if self._config.mode == "act" else InForce()

    @property
    def needs_other_engines(self) -> bool:
        """Whether engines hold their weights in other formats than the present level asks for."""
        return not self.in_force.same_format(self._of_engines)

    def after_step(self, step: int, metrics: dict[str, float], published: PublishReport) -> dict[str, float]:
        """Judge a step by its metrics; returns the guard's own. An action is reported in one line."""
        seen, before = Observation.of(metrics), self.state
        self.state = advance(before, seen, self._config, num_actions=len(self._actions))
        if self.state.level != before.level:
            assert seen is not None, "a step without tokens is no cause"
            self._move(step, before.level, reason(seen, self._config), published)
        return {
            "guard/level": float(self.state.level),
            "guard/actions": float(self.state.num_actions),
            "guard/bad_steps": float(self.state.bad),
        }

    def _lower_level(self, before: GuardState) -> str:
        """The line of a start whose ladder does not begin with the actions in force."""
        lost = (before.actions or ())[self.state.level :]
        verb = "no longer in force" if self._config.mode == "act" else "no longer advised"
        return (
            f"the actions of this run have changed: level {self.state.level} of {len(self._actions)} instead of "
            f"{before.level}" + (f"; {verb}: {'; '.join(action.line for action in lost)}" if lost else "")
        )

    def _move(self, step: int, level: int, why: str, published: PublishReport) -> None:
        up = self.state.level > level
        self.state = replace(self.state, actions=self._actions[: self.state.level])
        action = self._actions[level if up else level - 1]
        detail = ""
        if up and action.kind == "bf16_layers":
            sqnr_db = {layer: codes.sqnr_db for layer, codes in published.codes.items()}
            layers = worst_layers(self.state.layers, sqnr_db, int(action.value))
            self.state = replace(self.state, layers=layers)
            detail = f": {', '.join(map(str, layers))}"
        verb = {("act", True): "set", ("act", False): "take back"}.get(
            (self._config.mode, up), "advise" if up else "no longer advise"
        )
        self._report(
            f"step {step + 1}, level {self.state.level} of {len(self._actions)}: {verb} {action.line}{detail}; {why}"
        )
