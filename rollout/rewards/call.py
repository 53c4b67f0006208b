"""Calls a reward function inside a worker process and converts the result to plain numbers.

The worker process imports neither ray nor torch. Exceptions of the function become text here, because some of them
cannot be pickled. A return value of the wrong type affects every sample, so it is reported separately and stops the
run.
"""

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from types import ModuleType

from history.config import load_function

FIELD = "reward.function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one call."""

    function: str
    """Dotted path."""
    data_source: str
    solution_str: str
    ground_truth: str
    extra_info_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """Result of one call."""

    reward: float = math.nan
    details: tuple[tuple[str, float], ...] = ()
    error: str = ""
    """The function raised, or returned a number that is not finite."""
    is_late: bool = False
    """The error is that the call exceeded its time or its CPU seconds."""
    misuse: str = ""
    """The function returned neither a number nor a dict with `score`, or an `acc` that is no number."""


def load_reward(function: str) -> Callable[..., object]:
    """The reward function at a dotted path.

    Raises:
        ValueError: there is no such function.
    """
    return _loaded(function)


def check_reward(function: str, *, timeout_s: float, cpu_s: float) -> None:
    """Call `check_settings(timeout_s, cpu_s)` of the reward function's module, if it has one.

    Raises:
        ValueError: there is no such function, or it cannot work on this machine or within these limits.
    """
    check = getattr(_module(function), "check_settings", None)
    if check is not None:
        check(timeout_s=timeout_s, cpu_s=cpu_s)


def late_score(function: str) -> float | None:
    """`LATE_SCORE` of the reward function's module, the reward of a late call; None if it declares none.

    Raises:
        ValueError: there is no such function, or `LATE_SCORE` is no finite number.
    """
    score = getattr(_module(function), "LATE_SCORE", None)
    if score is None:
        return None
    if not isinstance(score, Real) or not math.isfinite(number := _float(score)):
        raise ValueError(
            f"{FIELD}: `LATE_SCORE` of the module of {function} is {score!r:.200}; it must be a finite number"
        )
    return number


def is_async(function: str) -> bool:
    """Whether the function is an `async def`; errors as for `load_reward`."""
    loaded = _loaded(function)
    return inspect.iscoroutinefunction(loaded) or inspect.iscoroutinefunction(type(loaded).__call__)


def call_reward(request: RewardRequest) -> RewardOutcome:
    """Call the function; its exceptions become part of the outcome. An `async def` runs in a loop of its own."""
    try:
        returned = _begin(request)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return read_outcome(returned, function=request.function)
    except BaseException as error:  # the border to the user's code: no sample ends the run, not by `sys.exit` either
        return _failed(error)


async def call_reward_async(request: RewardRequest, *, timeout_s: float) -> RewardOutcome:
    """Call and await an `async def`; it is cancelled after `timeout_s`."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            returned = _begin(request)
            if inspect.isawaitable(returned):
                returned = await returned
        return late_outcome(timeout_s) if limit.expired() else read_outcome(returned, function=request.function)
    except BaseException as error:  # as above
        return late_outcome(timeout_s) if limit.expired() else _failed(error)


def late_outcome(timeout_s: float) -> RewardOutcome:
    """Outcome of a call that exceeded its time."""
    return RewardOutcome(error=f"over the limit of {timeout_s} s", is_late=True)


def _module(function: str) -> ModuleType:
    load_reward(function)
    return sys.modules[function.rpartition(".")[0]]


def _begin(request: RewardRequest) -> object:
    return _loaded(request.function)(
        data_source=request.data_source,
        solution_str=request.solution_str,
        ground_truth=request.ground_truth,
        extra_info=json.loads(request.extra_info_json),
    )


def _failed(error: BaseException) -> RewardOutcome:
    return RewardOutcome(error=f"{type(error).__name__}: {error}")


def read_outcome(returned: object, *, function: str) -> RewardOutcome:
    """Outcome of a returned number, or of a dict with a number under `score`; its further numbers become details.

    A single value of numpy or torch counts as a number, also a boolean. A detail that is no finite number is left out,
    but an `acc` is refused then, unless it is None: evaluations would take `score` in its place.
    """
    reward = _plain(returned.get("score") if isinstance(returned, Mapping) else returned)
    if not isinstance(reward, Real):
        return RewardOutcome(
            misuse=f"{FIELD}: {function} returned {returned!r:.200}; it must return a number, or a dict with `score`"
        )
    if not math.isfinite(number := _float(reward)):
        return RewardOutcome(error=f"returned {_shown(reward)}, which is not finite as a float")
    accuracy = _plain(returned.get("acc")) if isinstance(returned, Mapping) else None
    if isinstance(accuracy, Real) and not math.isfinite(_float(accuracy)):
        return RewardOutcome(error=f"returned `acc` = {_shown(accuracy)}, which is not finite as a float")
    if not isinstance(accuracy, Real | None):
        return RewardOutcome(
            misuse=f"{FIELD}: {function} returned `acc` = {accuracy!r:.200}; it must be a number from 0 to 1, or None "
            "where the accuracy is `score`"
        )
    return RewardOutcome(reward=number, details=_details(returned))


def _details(returned: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(returned, Mapping):
        return ()
    values = ((str(name), _plain(value)) for name, value in returned.items() if name != "score")
    details = ((name, _float(value)) for name, value in values if isinstance(value, Real))
    return tuple((name, value) for name, value in details if math.isfinite(value))


def _plain(value: object) -> object:
    """A single value of numpy or torch, one without dimensions, as Python's; other values as they are."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def _float(value: Real) -> float:
    """The value as a float; infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _shown(value: Real) -> str:
    try:
        return f"{value!r:.50}"
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a number of very many digits"


@lru_cache(maxsize=1)
def _loaded(function: str) -> Callable[..., object]:
    return load_function(function, field=FIELD)
