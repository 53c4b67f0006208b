"""Checks that a command can write its outputs, before it works for hours. Creates nothing."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

WARM_START_MARKER = ".written_by_sft"
"""Name of a file in every directory written by `megatron-rl sft`; only such a directory is replaced."""

MOST_NAME_BYTES = 255
"""Longest name of a file on Linux."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def path_problems(key: str, path: str) -> list[str]:
    """Problems of a path with which no file can be made or looked up, whether one is there or not."""
    shown = path if len(path) <= 60 else f"{path[:57]}..."
    if _CONTROL.search(path):
        return [f"`{key}` = {path[:60]!r} holds a line break or another control character; name another path"]
    try:
        if any(len(os.fsencode(part)) > MOST_NAME_BYTES for part in Path(path).parts):
            return [f"`{key}` = {shown} has a name of more than {MOST_NAME_BYTES} bytes; shorten it"]
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # too long as a whole, or in a folder that this user may not enter
        return [f"`{key}` = {shown}: {error.strerror}; name another path"]
    except UnicodeEncodeError:
        return [f"`{key}` = {path[:60]!r} holds half of a character; name another path"]
    return []


def folder_problems(key: str, path: str) -> list[str]:
    """Problems of a directory that will be created, or written to if it exists."""
    if found := path_problems(key, path):
        return found
    target = Path(path).absolute()
    if target.exists() and not target.is_dir():
        return [f"`{key}` = {path} is a file; name a directory"]
    existing = next(place for place in (target, *target.parents) if place.exists())
    if not existing.is_dir():
        return [f"`{key}` = {path}: {existing} is a file, no directory can be made in it; name another directory"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [
            f"`{key}` = {path}: {existing} is not writable for this user; change its owner or name another directory"
        ]
    return []


def file_problems(key: str, path: str) -> list[str]:
    """Problems of a file that will be written; none for an empty path, which means no file."""
    if not path:
        return []
    if found := path_problems(key, path):
        return found
    if Path(path).is_dir():
        return [f"`{key}` = {path} is a directory; name a file in it"]
    if Path(path).exists() and not os.access(path, os.W_OK):
        return [f"`{key}` = {path} is not writable for this user; name another file"]
    return folder_problems(key, str(Path(path).parent))


def warm_start_target(path: str, model: str, kept: Mapping[str, str]) -> list[str]:
    """Problems of a warm start's output directory, which may hold nothing but an earlier warm start.

    Args:
        path: the directory. It is replaced.
        model: directory to start from.
        kept: paths of further files by configuration key; an empty one means no file.
    """
    if found := path_problems("output_dir", path):
        return found
    target = Path(path).resolve()
    if target == Path(model).resolve():
        return [f"`output_dir` = {path} is the model itself; name another directory"]
    for key, other in {"model": model, **kept}.items():
        if other and not path_problems(key, other) and Path(other).resolve().is_relative_to(target):
            return [f"`{key}` = {other} is in `output_dir` = {path}, which is replaced; name another path"]
    if target.is_dir() and not (target / WARM_START_MARKER).exists():
        return [f"`output_dir` = {path} exists and is no earlier output of `sft`; name another directory"]
    return folder_problems("output_dir", str(target.parent) if target.is_dir() else path)
