"""The base of every configuration class, and the configuration of the history.

Configuration is data: frozen, typed, complete. Unknown keys are refused by every class; the
launcher turns that refusal into an error that names the nearest known key.

`load_function` loads a function by its dotted path, so that rewards, losses and advantages are replaceable from the
configuration.

It lives in the leftmost package because both `rollout` (rewards) and `megatron_rl` (losses, advantages) need it.
A path that does not lead to a callable is the user's error: the message names the field, the path, the part that
failed and the nearest name that exists.
"""

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType

from pydantic import BaseModel, ConfigDict, Field


class Config(BaseModel):
    """Frozen, strict about unknown keys; the docstring under a field is its documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class HistoryConfig(Config):
    """What is remembered of finished responses, and how engines draft from it."""

    record_traces: bool = True
    """Write every training response's token ids to `traces/` in the run directory (jsonl)."""
    drafts: bool = True
    """Engines draft from what their prompts produced before, and verify exactly. A deterministic run never drafts."""
    max_draft_tokens: int = Field(default=16, gt=0, le=128)
    """Longest draft of one request in one forward; how much of it is used is decided by price, forward by forward."""
    baseline_engines: tuple[int, ...] = ()
    """Numbers of engines that run without any speculation, for comparison."""
    num_shards: int = Field(default=1, gt=0)
    """Actors that own the history, each a share of the prompts."""
    budget_bytes: int = Field(default=2 << 30, gt=0)
    """Most bytes of tokens that all shards together remember; beyond it the least valuable prompts are forgotten."""
    kept_steps: int = Field(default=1, gt=0)
    """Visits of a prompt whose responses are kept; the last one is what counts, older ones add nothing."""
    warm_start: str = ""
    """History of another run to begin with: a `history` folder of a checkpoint, or a jsonl file (or folder) of traces.
    Refused if it was made with another tokenizer."""


def load_function(path: str, *, field: str) -> Callable[..., object]:
    """The callable at `path` (`package.module.name`); `field` is the configuration key named in errors.

    Raises ValueError when the path has no dot, its module cannot be imported, or the name is missing or not callable.
    """
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise ValueError(f"{field}: {path!r} is not a dotted path; write it as package.module.function")
    module = _import(module_path, path=path, field=field)
    if not hasattr(module, name):
        raise ValueError(f"{field}: {path!r}: module {module_path!r} has no {name!r}{_nearest(module, name)}")
    found: object = getattr(module, name)
    if not callable(found):
        raise ValueError(f"{field}: {path!r} is a {type(found).__name__}, but a function is needed")
    return found


def _import(module_path: str, *, path: str, field: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except ImportError as error:
        raise ValueError(f"{field}: {path!r}: cannot import module {module_path!r}: {error}") from error


def _nearest(module: ModuleType, name: str) -> str:
    public = [known for known in vars(module) if not known.startswith("_") and callable(getattr(module, known))]
    nearest = difflib.get_close_matches(name, public, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
