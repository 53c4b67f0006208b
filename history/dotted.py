"""Loads a function by its dotted path, so that rewards, losses and advantages are replaceable from the configuration.

It lives in the leftmost package because both `rollout` (rewards) and `megatron_rl` (losses, advantages) need it.
A path that does not lead to a callable is the user's error: the message names the field, the path, the part that
failed and the nearest name that exists.
"""

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType


def load_dotted(path: str, *, field: str) -> Callable[..., object]:
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
