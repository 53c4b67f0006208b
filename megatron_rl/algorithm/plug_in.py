"""Loads the function of a stage with its settings: built in, or one's own by its dotted path.

Every function takes its inputs and its settings. The annotations of these two parameters say all that the system needs
to know: the first one where the function runs, the second one which settings it has (a subclass of
`history.config.Config`, or `NoSettings`). Columns of further models are declared by a decorator (`needs`).

Importing this module loads no torch; functions of one's own are imported when they are loaded.
"""

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, get_type_hints

from pydantic import ValidationError

from history.config import Config, load_function
from megatron_rl.algorithm_config import AlgorithmConfig
from megatron_rl.algorithm_settings import ADVANTAGES, AGGREGATIONS, FILTERS, LOSSES, SHAPINGS, STAGES
from megatron_rl.stages import Choice, Column, PlugIn, Stage, known_settings

Function = TypeVar("Function", bound=Callable[..., object])
_INPUTS = {
    FILTERS.key: ("GroupOutcome", "GroupSignal"),
    SHAPINGS.key: ("GroupOutcome",),
    ADVANTAGES.key: ("GroupOutcome", "BatchOutcome", "TokenOutcome"),
    LOSSES.key: ("LossInputs",),
    AGGREGATIONS.key: ("MeanInputs",),
}
"""Classes of `megatron_rl.algorithm` that the functions of a stage may take; names, because some of them load torch."""
_NEEDS: dict[Callable[..., object], frozenset[Column]] = {}


class NoSettings(Config):
    """The settings of a function without any."""


def needs(*columns: Column) -> Callable[[Function], Function]:
    """Declares that a function reads columns that cost forwards of a further model."""

    def declare(function: Function) -> Function:
        _NEEDS[function] = frozenset(columns)
        return function

    return declare


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The function of a stage, ready to be called."""

    function: Callable[..., object]
    """Takes its inputs only."""
    inputs: type
    """Annotation of its first parameter."""
    needs: frozenset[Column]


def load_stage(stage: Stage, choice: Choice) -> Loaded:
    """The function that a configuration names.

    Raises ValueError if there is none, if it has other parameters than inputs and settings, or if its settings are
    refused. The message begins with the configuration key.
    """
    own = isinstance(choice, PlugIn)
    function = load_function(choice.name if own else choice.path, field=stage.key)
    inputs, kind = _parameters(function, stage=stage, choice=choice)
    settings = _settings(choice, kind, stage=stage) if isinstance(choice, PlugIn) else choice
    columns = _NEEDS.get(function, frozenset()) if own else choice.needs
    return Loaded(function=partial(function, settings=settings), inputs=inputs, needs=columns)


def needed_columns(algorithm: AlgorithmConfig) -> frozenset[Column]:
    """The columns of further models that the configured functions and the divergence read."""
    loaded = [load_stage(stage, algorithm.stages[stage.key]).needs for stage in STAGES]
    reference: frozenset[Column] = frozenset() if algorithm.kl.place == "none" else frozenset({"ref"})
    return reference.union(*loaded)


def _parameters(function: Callable[..., object], *, stage: Stage, choice: Choice) -> tuple[type, type[Config]]:
    """Annotations of inputs and settings."""
    where = f"{stage.key}: {choice.name}"
    names = list(inspect.signature(function).parameters)
    hints = get_type_hints(function)
    if len(names) != 2 or names[1] != "settings" or not all(name in hints for name in names):
        raise ValueError(
            f"{where} has the parameters ({', '.join(names)}); a function of a stage has two with annotations, its "
            "inputs and `settings` (annotate it with `NoSettings` if it has none)"
        )
    inputs, kind = hints[names[0]], hints[names[1]]
    if getattr(inputs, "__name__", "") not in _INPUTS[stage.key]:
        raise ValueError(
            f"{where}: its parameter `{names[0]}` is annotated with {inputs}; this stage takes "
            f"{' or '.join(_INPUTS[stage.key])} of `megatron_rl.algorithm`"
        )
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        raise ValueError(f"{where}: its settings are annotated with {kind}; write a subclass of history.config.Config")
    return inputs, kind


def _settings(choice: PlugIn, kind: type[Config], *, stage: Stage) -> Config:
    given = dict(choice.given)
    if issubclass(kind, Choice):
        given["name"] = kind.model_fields["name"].default
    try:
        return kind.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        problems = "; ".join(
            _problem(stage, kind, ".".join(map(str, item["loc"])), item["type"], item["msg"]) for item in error.errors()
        )
        raise ValueError(f"the settings of {choice.name}: {problems}") from None


def _problem(stage: Stage, kind: type[Config], key: str, type_: str, message: str) -> str:
    if type_ != "extra_forbidden":
        return f"`{stage.key}.{key}`: {message[0].lower()}{message[1:]}"
    return f"unknown key `{stage.key}.{key}`{known_settings(key, kind.model_fields)}"
