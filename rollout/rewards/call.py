"""Calls a reward function inside a worker process and converts the result to plain numbers.

The worker process imports neither ray nor torch. Exceptions of the function become text here, because some of them
cannot be pickled. A return value of the wrong type affects every sample, so it is reported separately and stops the
run.
"""

import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real

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
    misuse: str = ""
    """The function returned something that is neither a number nor a dict with `score`."""


def load_reward(function: str) -> Callable[..., object]:
    """The reward function at a dotted path.

    Raises:
        ValueError: there is no such function.
    """
    return _loaded(function)


def begin_worker(function: str, memory_bytes: int, file_bytes: int) -> None:
    """Prepare a worker process: limits, without Ray's variables, in a process group of its own.

    One of Ray's variables holds the secret of the run. The time limit of a call terminates the worker, and with it the
    processes that the reward function has started. A limit on their number would count all processes of the user.

    Args:
        function: dotted path of the reward function.
        memory_bytes: most private memory of the worker, and of each process that it starts.
        file_bytes: largest file that they may write.

    Raises:
        ValueError: there is no such function.
    """
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_DATA, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
    ):
        _, allowed = resource.getrlimit(limit)
        most = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(limit, (most, most))
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    load_reward(function)


def check_reward(function: str, *, timeout_s: float) -> None:
    """Call `check_settings(timeout_s)` of the reward function's module, if it has one.

    Raises:
        ValueError: there is no such function, or it cannot work on this machine or within `timeout_s`.
    """
    load_reward(function)
    check = getattr(sys.modules[function.rpartition(".")[0]], "check_settings", None)
    if check is not None:
        check(timeout_s)


def call_reward(request: RewardRequest) -> RewardOutcome:
    """Call the function; its exceptions become part of the outcome."""
    function = _loaded(request.function)
    try:
        returned = function(
            data_source=request.data_source,
            solution_str=request.solution_str,
            ground_truth=request.ground_truth,
            extra_info=json.loads(request.extra_info_json),
        )
    except BaseException as error:  # the border to the user's code: no sample ends the run, not by `sys.exit` either
        return RewardOutcome(error=f"{type(error).__name__}: {error}")
    return read_outcome(returned, function=request.function)


def read_outcome(returned: object, *, function: str) -> RewardOutcome:
    """Outcome of a returned number, or of a dict with a number under `score`; its further numbers become details."""
    reward = returned.get("score") if isinstance(returned, Mapping) else returned
    if not isinstance(reward, Real):
        return RewardOutcome(
            misuse=f"{FIELD}: {function} returned {returned!r:.200}; it must return a number, or a dict with `score`"
        )
    if not math.isfinite(reward):
        return RewardOutcome(error=f"returned {reward}, which is not finite")
    return RewardOutcome(reward=float(reward), details=_details(returned))


def _details(returned: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(returned, Mapping):
        return ()
    numbers = ((str(name), value) for name, value in returned.items() if name != "score")
    return tuple((name, float(value)) for name, value in numbers if isinstance(value, Real))


@lru_cache(maxsize=1)
def _loaded(function: str) -> Callable[..., object]:
    return load_function(function, field=FIELD)
