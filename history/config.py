"""The base of every configuration class, and the configuration of the history.

Configuration objects are frozen and typed. Every class refuses unknown keys; the launcher turns that refusal into
an error that names the nearest known key.

`load_function` loads a function by its dotted path. The configuration can thereby replace rewards, losses and
advantages. The function is in this package because `rollout` (rewards) and `megatron_rl` (losses, advantages) need it.
If a path leads to no callable, the error names the field, the path, the failing part and the nearest existing name.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

MOST_SHARDS = 16
"""Most shards by default. Every engine sends to each shard, and every reader fetches from each."""
MOST_PROCESSES = 10_000
"""Upper bound of numbers of processes of a kind, and of nodes. Checks plan every one of them before they refuse."""
LONGEST_S = 1e9
"""Upper bound of time limits in seconds, three decades: timers of Python and torch overflow at 9.2e9 s."""
MOST_BYTES = (1 << 63) - 1
"""Upper bound of sizes that the system receives as a signed number of 64 bits."""
MOST_SEED = (1 << 63) - 1
"""Upper bound of seeds: torch takes up to 64 bits, and Megatron adds a number for each rank."""


class Config(BaseModel):
    """Frozen base class that refuses unknown keys. The docstring under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    moved: ClassVar[Mapping[str, str]] = {}
    """What to write instead of a key of earlier versions."""


class HistoryConfig(Config):
    """The history of finished responses and how engines draft from it."""

    record_traces: bool = True
    """Write the token ids of every training response to `traces/` in the run directory (jsonl)."""
    drafts: bool = True
    """Engines draft from earlier responses to the same prompt and verify every draft exactly. A deterministic run never
    drafts."""
    max_draft_tokens: int = Field(default=16, gt=0, le=128)
    """Longest draft of one request in one forward. The cost model decides in every forward how much is verified."""
    baseline_engines: tuple[int, ...] = ()
    """Numbers of engines that run without drafts, as a baseline."""
    num_shards: int = Field(default=0, ge=0, le=MOST_PROCESSES)
    """Actors that hold the history; each holds a share of the prompts. 0: one for each node of the run, at most 16."""
    budget_bytes: int = Field(default=2 << 30, gt=0)
    """Upper bound of the token bytes in all shards together. Above it, the prompts of least value are evicted."""
    shm_bytes: int = Field(default=0, ge=0)
    """Upper bound of the segments in the `/dev/shm` of a node, from which its engines draft. 0: as much as the longest
    responses of two steps need. Above it, the prompts that are needed last are left out and have no drafts."""
    kept_steps: int = Field(default=1, gt=0)
    """Number of visits of a prompt whose responses are kept. More than one rarely helps."""
    warm_start: str = ""
    """History of an earlier run to start from: the `history` folder of a checkpoint, or a file or folder of jsonl
    traces. It is refused if another tokenizer wrote it."""

    def shards_over(self, num_nodes: int) -> int:
        """Number of shards of a run on so many nodes."""
        return self.num_shards or min(num_nodes, MOST_SHARDS)


def load_function(path: str, *, field: str) -> Callable[..., object]:
    """Load the callable at `path` (`package.module.name`); errors name the configuration key `field`.

    Raises ValueError when the path has no dot, its module cannot be imported, or the name is missing or not callable.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise ValueError(f"{field}: {path!r} is not a dotted path; write it as package.module.function")
    module = _import(module_path, path=path, field=field)
    if not hasattr(module, name):
        raise ValueError(f"{field}: {path!r}: module {module_path!r} has no {name!r}{_nearest(module, name)}")
    function: object = getattr(module, name)
    if not callable(function):
        raise ValueError(f"{field}: {path!r} is a {type(function).__name__}, but a function is needed")
    return function


def _import(module_path: str, *, path: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except ImportError as error:
        raise ValueError(f"{field}: {path!r}: cannot import module {module_path!r}: {error}") from error


def _nearest(module: ModuleType, name: str) -> str:
    public = [known for known in vars(module) if not known.startswith("_") and callable(getattr(module, known))]
    nearest = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
