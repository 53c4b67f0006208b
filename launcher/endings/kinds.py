"""Kinds of endings, each with an exit code, and the function that finds the kind of an error.

The whole chain of an error is read: the remote error inside Ray's wrapping, `raise ... from`, and the error that was
being handled. Kinds are tried in the order of `_JUDGES`. A broken reward function comes before lack of disk and memory:
its class is certain, and its text quotes the user's error. They come before the others: a publish that fails for lack
of memory counts as out of memory, not as refused. Some errors cross a process border as text, so their text is read
too. Pure: imports neither ray nor torch.
"""

import errno
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from launcher.errors import LaunchError, Terminated
from megatron_rl.controller.publish_refusal import PublishRefusedError
from megatron_rl.controller.stopping import StopRequestedError
from rollout.failures import (
    NOWHERE,
    DeadlineError,
    EnginesLostError,
    Place,
    PlacedError,
    ProcessLostError,
    RewardBrokenError,
    UnusableDeviceError,
    brief,
    node_of,
)

_DISK_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_DISK_TEXTS = (
    *("No space left on device", "Disk quota exceeded", "StorageFull", "has no room for"),
    *("Read-only file system", "Input/output error", "Stale file handle"),
    "] . unexpected pos ",  # torch.save, whose last write was short
)
_NOT_PERMITTED = (errno.EACCES, errno.EPERM)
_HOST_MEMORY_TEXTS = (
    *("can't allocate memory", "Cannot allocate memory"),
    *("node was running low on memory", "node running low on memory"),
)
_MEMORY_TEXTS = (
    *_HOST_MEMORY_TEXTS,
    *("CUDA out of memory", "MemoryError", "OutOfMemoryError", "No available memory for the cache blocks"),
)
_DEVICE_MEMORY = re.compile(
    r"CUDA error: out of memory|_STATUS_ALLOC_FAILED|Cuda failure [^\n]*out of memory", re.IGNORECASE
)
"""Of CUDA and vLLM's allocator, of cuBLAS and cuDNN, of NCCL."""
_MEMORY_CLASSES = {"MemoryError", "OutOfMemoryError", "ObjectStoreFullError"}
_DEATH_CLASSES = {"RayActorError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError", "OwnerDiedError"}
_DEATH_TEXTS = ("Engine core initialization failed",)
"""vLLM's, if its core process ended during the start."""


class Ending(Enum):
    """Exit code, title and advice of each kind of failure."""

    USER_INPUT = (2, "the input cannot be used", "")
    PUBLISH_REFUSED = (
        3,
        "a publish of weights was refused",
        "No token was sampled from these weights. docs/faults.md lists the faults that each proof detects.",
    )
    ENGINES_LOST = (
        4,
        "engines were lost too often",
        "Read the log of the engine. If memory ran out, lower `engine.kv_cache_bytes` or `engine.max_num_seqs`; "
        "`engine.max_restarts` allows more restarts within 100 finished steps.",
    )
    DEADLINE = (
        5,
        "a deadline passed",
        "Read the log of the late process, and `logs/stacks/`. If the process was only slow, raise "
        "`trainer.timeout_s`, `trainer.progress_timeout_s`, "
        "`publish.timeout_s`, `engine.start_timeout_s` or `engine.update_timeout_s`.",
    )
    REWARD_BROKEN = (
        6,
        "the reward function is broken",
        "Fix the function that `reward.function` names; first call it alone with one row of the data set. "
        "If it needs more memory, raise `reward.memory_bytes`.",
    )
    UNWRITABLE = (
        7,
        "the disk is full or cannot be written",
        "Free space on that file system or make it writable, or name another `run_dir`. A lower "
        "`checkpoint.keep_last`, `checkpoint.keep_last_samples` and `history.record_traces=false` write less.",
    )
    OUT_OF_MEMORY = (
        8,
        "memory ran out",
        "Lower `engine.kv_cache_bytes`, `engine.max_num_seqs` or `trainer.max_micro_batch_tokens`; "
        "`megatron-rl run CONFIG --dry-run` prints the memory of each.",
    )
    PROCESS_LOST = (
        9,
        "a process was lost",
        "Read the log of that process. A person or the machine's out-of-memory killer may have killed it "
        "(`dmesg | grep -i oom`).",
    )
    NOT_PERMITTED = (
        10,
        "the rights to a file are missing",
        "Give this user the rights to the file and its folders (`namei -l FILE` shows them), or name another path.",
    )
    STOPPED = (75, "stopped on request", "")
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
        """The failure in a few words."""
        return self.value[1]

    @property
    def advice(self) -> str:
        """Advice to the user, whatever the error; empty if nothing has to be done."""
        return self.value[2]


_REFUSED_IN_8_BITS = (
    "If it happens again, run with `engine.format=bf16`: if that works, the 8-bit kernels of this machine are wrong."
)
"""Further advice for a publish of 8-bit weights."""
_HOST_MEMORY = (
    "It is memory of the node, not of a GPU. Lower `history.budget_bytes`, `reward.num_workers`, "
    "`reward.memory_bytes` or `cluster.object_store_bytes`, set `checkpoint.background=false`, set "
    "`engine.sleep_level=2` in place of 1, or give the job more memory (`--mem`). Engines and trainer on CPUs use it, "
    "too: `megatron-rl run CONFIG --dry-run` prints the memory of each."
)
"""Advice if host memory ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Kind, message and place of an error."""

    ending: Ending
    message: str
    place: Place
    advice: str
    """To the user; empty if nothing has to be done."""


def judge(error: BaseException, *, memory_kills: int = 0, in_8_bits: bool = False) -> Verdict:
    """The kind of `error`.

    Args:
        error: what ended the command.
        memory_kills: processes that the out-of-memory killer has ended in this step or the one before, or since the
            command began.
        in_8_bits: engines have weights in 8 bits.
    """
    chain = list(causes(error))
    matches = ((ending, cause) for ending, holds in _JUDGES.items() for cause in chain if holds(cause))
    ending, decisive = next(matches, (Ending.DEFECT, root(error)))
    if memory_kills and ending in (Ending.PROCESS_LOST, Ending.ENGINES_LOST, Ending.DEADLINE):
        kills = f"the out-of-memory killer ended {memory_kills} process(es) in the last two steps or since the start; "
        return Verdict(
            ending=Ending.OUT_OF_MEMORY, message=kills + brief(decisive), place=_place(chain), advice=_HOST_MEMORY
        )
    advice = _advice(ending, chain, in_8_bits=in_8_bits)
    return Verdict(ending=ending, message=_message(ending, decisive, chain), place=_place(chain), advice=advice)


def _advice(ending: Ending, chain: Sequence[BaseException], *, in_8_bits: bool) -> str:
    # an error of a rank or an engine arrives within a CallError, which decides the kind by its text
    if ending is Ending.OUT_OF_MEMORY and any(map(_is_host_memory, chain)):
        return _HOST_MEMORY
    if ending is Ending.PUBLISH_REFUSED and in_8_bits:
        return f"{ending.advice} {_REFUSED_IN_8_BITS}"
    return ending.advice


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and every error that led to it, outermost first, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        remote = getattr(current, "cause", None)
        earlier = (remote, current.__cause__, None if current.__suppress_context__ else current.__context__)
        waiting += [cause for cause in earlier if isinstance(cause, BaseException)]


def root(error: BaseException) -> BaseException:
    """The first error of the chain that led to `error`; its traceback shows the fault."""
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
    places = [cause.place for cause in chain if isinstance(cause, PlacedError) and cause.place != NOWHERE]
    if places:
        return places[0]
    return Place(node=next((node for cause in chain if (node := node_of(cause))), ""))


def _message(ending: Ending, decisive: BaseException, chain: list[BaseException]) -> str:
    """The message of the error that decided the kind, after that of the outermost error if the two differ."""
    inner, outer = brief(decisive), brief(chain[0])
    if isinstance(decisive, OSError) and decisive.filename:
        inner = f"{decisive.strerror}: {decisive.filename}"
    if ending is Ending.DEFECT or inner in outer or not isinstance(chain[0], PlacedError):
        return inner
    return f"{outer}; {inner}"


def _is_named(error: BaseException, names: set[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _is_disk(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK_NUMBERS:
        return True
    return _is_named(error, {"OutOfDiskError"}) or any(text in str(error) for text in _DISK_TEXTS)


def _is_not_permitted(error: BaseException) -> bool:
    # a signal or a port has no file name
    return isinstance(error, OSError) and error.errno in _NOT_PERMITTED and bool(error.filename)


def _is_memory(error: BaseException) -> bool:
    text = str(error)
    is_told = any(known in text for known in _MEMORY_TEXTS) or bool(_DEVICE_MEMORY.search(text))
    return is_told or _is_named(error, _MEMORY_CLASSES) or _is_host_memory(error)


def _is_host_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(known in str(error) for known in _HOST_MEMORY_TEXTS)


def _is_deadline(error: BaseException) -> bool:
    # an error raised inside vLLM's process arrives as text
    is_late = isinstance(error, DeadlineError) or _is_named(error, {"GetTimeoutError"})
    return is_late or "DeadlineError: " in str(error)


def _is_death(error: BaseException) -> bool:
    is_lost = isinstance(error, ProcessLostError) or _is_named(error, _DEATH_CLASSES)
    return is_lost or any(text in str(error) for text in _DEATH_TEXTS)


_JUDGES: dict[Ending, Callable[[BaseException], bool]] = {
    Ending.TERMINATED: lambda error: isinstance(error, Terminated),
    Ending.INTERRUPTED: lambda error: isinstance(error, KeyboardInterrupt),
    Ending.STOPPED: lambda error: isinstance(error, StopRequestedError),
    Ending.USER_INPUT: lambda error: isinstance(error, (LaunchError, UnusableDeviceError)),
    Ending.REWARD_BROKEN: lambda error: isinstance(error, RewardBrokenError),
    Ending.UNWRITABLE: _is_disk,
    Ending.NOT_PERMITTED: _is_not_permitted,
    Ending.OUT_OF_MEMORY: _is_memory,
    Ending.ENGINES_LOST: lambda error: isinstance(error, EnginesLostError),
    Ending.DEADLINE: _is_deadline,
    Ending.PUBLISH_REFUSED: lambda error: isinstance(error, PublishRefusedError),
    Ending.PROCESS_LOST: _is_death,
}
"""Condition of each kind, in the order in which kinds are tried."""
