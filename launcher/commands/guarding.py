"""The guard's part of a run's configuration: its ladder of actions, and the engines of its present level.

vLLM fixes the format of a layer when it builds the model, and a publish is planned for these formats. So an action on
formats ends the run's processes after a checkpoint, and the run resumes with other engines, within the same command.
Actions on formats whose engines do not fit, or that the checks refuse for another reason, are left out of the ladder,
and so are caps that would leave the correction's band empty. With `engine.gpu_memory_fraction` the engines of a level
have a KV cache of their own size: these checks and the start of the level compute it in the same way.
"""

from collections.abc import Callable, Sequence

from launcher.checks.check import CheckedRun, check_run
from launcher.config.schema import RunConfig
from launcher.errors import ConfigError
from megatron_rl.algorithm.guard import Action, GuardState, InForce, in_force, ladder
from rollout.weights.format import WeightFormat

CAPPED_MODES = ("tis_token", "tis_sequence", "icepop", "icepop_sequence", "mis_product", "mis_geometric")
"""Modes of `algorithm.correction` with a cap."""


def ladder_of(checked: CheckedRun, say: Callable[[str], None]) -> tuple[Action, ...]:
    """The actions that this run can take, cheapest first; empty if the guard is off. `say` gets what it cannot do."""
    config = checked.config
    guard, correction = config.algorithm.guard, config.algorithm.correction
    if guard.mode == "off":
        return ()
    layers = _layers_in_8_bits(checked)
    low = correction.low if correction.has_band else 0.0
    for cap in guard.caps:
        if cap <= low:
            say(f"guard: correction.cap = {cap:g} is no action of this run: correction.low = {low:g} is not below it")
    actions = ladder(
        guard,
        cap=correction.cap if correction.mode in CAPPED_MODES else None,
        low=low,
        layers_in_8_bits=len(layers),
        kv_in_8_bits=config.engine.kv_format != "bf16",
        overlap=config.planner.overlap,
    )
    possible = []
    for action in actions:
        if action.restarts_engines and (problem := _problem(checked, action, layers)):
            say(f"guard: {action.line} is no action of this run: {problem}")
        else:
            possible.append(action)
    say(f"guard ({guard.mode}): " + ("; ".join(action.line for action in possible) or "this run has no action"))
    return tuple(possible)


def guarded(checked: CheckedRun, actions: Sequence[Action], state: GuardState) -> CheckedRun:
    """The run with the engines of the guard's level on its ladder `actions`.

    Raises:
        ConfigError: such engines cannot run.
    """
    if checked.given.algorithm.guard.mode != "act":
        return checked
    given = engines_of(checked.given, in_force(actions, state.in_mode("act").on_ladder(actions)))
    return checked if given is checked.given else check_run(given, checked.nodes)


def engines_of(config: RunConfig, settings: InForce) -> RunConfig:
    """The configuration whose engines hold weights as `settings` say; unchanged where they say nothing."""
    if settings.bf16_rollouts:
        engine = config.engine.model_copy(update={"format": "bf16", "kv_format": "bf16"})
    elif settings.layers:
        modules = (*config.engine.bf16_modules, *(f"*.layers.{layer}.*" for layer in sorted(settings.layers)))
        engine = config.engine.model_copy(update={"bf16_modules": modules})
    else:
        return config
    return config.model_copy(update={"engine": engine})


def _layers_in_8_bits(checked: CheckedRun) -> list[int]:
    format = WeightFormat.of(checked.config.engine)
    if format.layout is None:
        return []
    return list(range(format.bf16_first_layers, checked.spec.num_layers - format.bf16_last_layers))


def _problem(checked: CheckedRun, action: Action, layers: Sequence[int]) -> str:
    """Why no engine can be as this action says; empty if it can."""
    is_last = action.kind == "bf16_rollouts"
    settings = InForce(bf16_rollouts=is_last, layers=() if is_last else tuple(layers[: int(action.value)]))
    try:
        check_run(engines_of(checked.given, settings), checked.nodes)
    except ConfigError as error:
        return " ".join(str(error).split())
    return ""
