"""The ways a command ends, each with an exit code, and which of them an error is.

An error is judged by everything that led to it: the remote error inside Ray's wrapping, `raise ... from`, and the error
that was being handled. What a machine lacks comes first (a publish that fails for want of memory is out of memory, not
refused); then the kinds in the order of `_JUDGES`. Some errors cross a process border as text, so that their text is
read as well. Pure: imports neither ray nor torch.
"""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from launcher.errors import LaunchError, Terminated
from megatron_rl.controller.publish_refusal import PublishRefusedError
from rollout.failures import (
    NOWHERE,
    DeadlineError,
    EnginesLostError,
    Place,
    PlacedError,
    ProcessLostError,
    RewardBrokenError,
    brief,
    node_of,
)

_DISK_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_DISK_TEXTS = ("No space left on device", "Disk quota exceeded", "StorageFull", "has no room for")
_MEMORY_TEXTS = (
    *("CUDA out of memory", "can't allocate memory", "Cannot allocate memory", "MemoryError", "OutOfMemoryError"),
    *("No available memory for the cache blocks", "node was running low on memory", "node running low on memory"),
)
_MEMORY_CLASSES = {"MemoryError", "OutOfMemoryError", "ObjectStoreFullError"}
_DEATH_CLASSES = {"RayActorError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OwnerDiedError"}


class Ending(Enum):
    """Exit code, title and advice of each way to end other than well."""

    USER_INPUT = (2, "the input cannot be used", "")
    PUBLISH_REFUSED = (
        3,
        "a publish of weights was refused",
        "No token was sampled from these weights. If it happens again, `engine.format=bf16` tells whether the 8-bit "
        "kernels of this machine are at fault; docs/faults.md lists what each proof finds.",
    )
    ENGINES_LOST = (
        4,
        "engines were lost too often",
        "Read the log of the engine. If memory ran out, lower `engine.kv_cache_bytes` or `engine.max_num_seqs`; "
        "`engine.max_restarts` allows more restarts.",
    )
    DEADLINE = (
        5,
        "a deadline passed",
        "Read the log of the late process. If it was only slow, raise `trainer.timeout_s`, `publish.timeout_s` or "
        "`engine.update_timeout_s`.",
    )
    REWARD_BROKEN = (
        6,
        "the reward function is broken",
        "Mend the function that `reward.function` names; call it alone with one row of the data set first.",
    )
    DISK_FULL = (
        7,
        "the disk is full",
        "Free space on that file system. `checkpoint.keep_last`, `history.record_traces=false` and another `run_dir` "
        "lower what a run writes there.",
    )
    OUT_OF_MEMORY = (
        8,
        "memory ran out",
        "Lower `engine.kv_cache_bytes`, `engine.max_num_seqs` or `trainer.max_micro_batch_tokens`; "
        "`megatron-rl run CONFIG --dry-run` prints what each takes.",
    )
    PROCESS_LOST = (
        9,
        "a process was lost",
        "Read the log of that process. Somebody may have killed it, or the memory killer of the machine has "
        "(`dmesg | grep -i oom`).",
    )
    DEFECT = (
        70,
        "a defect of megatron-rl, or of code that the configuration names",
        "Please report it, with the log.",
    )
    INTERRUPTED = (130, "interrupted", "")
    TERMINATED = (143, "terminated", "")

    @property
    def code(self) -> int:
        """Exit code."""
        return self.value[0]

    @property
    def title(self) -> str:
        """What happened, in a few words."""
        return self.value[1]

    @property
    def advice(self) -> str:
        """What to do; empty where nothing has to be done."""
        return self.value[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an error is and where it happened."""

    ending: Ending
    what: str
    place: Place


def judge(error: BaseException, *, memory_kills: int = 0) -> Verdict:
    """The kind of `error`; `memory_kills` processes were ended by the memory killer while the command ran."""
    chain = list(causes(error))
    hits = ((ending, one) for ending, holds in _JUDGES.items() for one in chain if holds(one))
    ending, found = next(hits, (Ending.DEFECT, root(error)))
    if memory_kills and ending in (Ending.PROCESS_LOST, Ending.ENGINES_LOST, Ending.DEADLINE):
        kills = f"the memory killer has ended {memory_kills} process(es) meanwhile; "
        return Verdict(ending=Ending.OUT_OF_MEMORY, what=kills + brief(found), place=_place(chain))
    return Verdict(ending=ending, what=_what(ending, found, chain), place=_place(chain))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all that led to it, outermost first, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        remote = getattr(one, "cause", None)
        led_to_it = (remote, one.__cause__, None if one.__suppress_context__ else one.__context__)
        waiting += [earlier for earlier in led_to_it if isinstance(earlier, BaseException)]


def root(error: BaseException) -> BaseException:
    """The first error of the chain that led to `error`; the one whose traceback shows the fault."""
    seen = {id(error)}
    while True:
        remote = getattr(error, "cause", None)
        if isinstance(remote, BaseException):
            return error  # Ray's wrapping has the remote traceback
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return error
        seen.add(id(earlier))
        error = earlier


def _place(chain: list[BaseException]) -> Place:
    placed = [one.place for one in chain if isinstance(one, PlacedError) and one.place != NOWHERE]
    if placed:
        return placed[0]
    return Place(node=next((node for one in chain if (node := node_of(one))), ""))


def _what(ending: Ending, found: BaseException, chain: list[BaseException]) -> str:
    """The kind's own error; before it the outermost one, which says what was being done, where that is another."""
    own = brief(found)
    if isinstance(found, OSError) and found.filename:
        own = f"{found.strerror}: {found.filename}"
    outer = brief(chain[0])
    return (
        own if ending is Ending.DEFECT or own in outer or not isinstance(chain[0], PlacedError) else f"{outer}; {own}"
    )


def _is_named(error: BaseException, names: set[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _is_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_NUMBERS:
        return True
    return _is_named(error, {"OutOfDiskError"}) or any(text in str(error) for text in _DISK_TEXTS)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return _is_named(error, _MEMORY_CLASSES) or any(text in str(error) for text in _MEMORY_TEXTS)


def _is_deadline(error: BaseException) -> bool:
    # raised inside vLLM's process it comes as text
    is_late = isinstance(error, DeadlineError) or _is_named(error, {"GetTimeoutError"})
    return is_late or "DeadlineError: " in str(error)


_JUDGES: dict[Ending, Callable[[BaseException], bool]] = {
    Ending.INTERRUPTED: lambda error: isinstance(error, KeyboardInterrupt),
    Ending.TERMINATED: lambda error: isinstance(error, Terminated),
    Ending.USER_INPUT: lambda error: isinstance(error, LaunchError),
    Ending.DISK_FULL: _is_disk,
    Ending.OUT_OF_MEMORY: _is_memory,
    Ending.REWARD_BROKEN: lambda error: isinstance(error, RewardBrokenError),
    Ending.ENGINES_LOST: lambda error: isinstance(error, EnginesLostError),
    Ending.DEADLINE: _is_deadline,
    Ending.PUBLISH_REFUSED: lambda error: isinstance(error, PublishRefusedError),
    Ending.PROCESS_LOST: lambda error: isinstance(error, ProcessLostError) or _is_named(error, _DEATH_CLASSES),
}
"""What holds of an error of each kind, in the order in which kinds are tried."""
