"""Whether a command can write where it is told to, judged before it works for hours. Creates nothing."""

import os
from pathlib import Path

WARM_START_MARKER = ".written_by_sft"
"""Lies in every directory that `megatron-rl sft` wrote; only such a directory is replaced."""


def folder_problems(key: str, path: str) -> list[str]:
    """Problems of a directory that will be made, or written to if it is there."""
    target = Path(path).absolute()
    if target.exists() and not target.is_dir():
        return [f"`{key}` = {path} is a file; name a directory"]
    there = next(place for place in (target, *target.parents) if place.exists())
    if not there.is_dir():
        return [f"`{key}` = {path}: {there} is a file, no directory can be made in it; name another directory"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"`{key}` = {path}: {there} cannot be written by this user; change its owner or name another directory"]
    return []


def file_problems(key: str, path: str) -> list[str]:
    """Problems of a file that will be written; an empty path means that none is."""
    if not path:
        return []
    if Path(path).is_dir():
        return [f"`{key}` = {path} is a directory; name a file in it"]
    if Path(path).exists() and not os.access(path, os.W_OK):
        return [f"`{key}` = {path} cannot be written by this user; name another file"]
    return folder_problems(key, str(Path(path).parent))


def warm_start_target(path: str, model: str) -> list[str]:
    """Problems of the directory that a warm start writes: nothing may lie there but an earlier warm start."""
    target = Path(path)
    if target.resolve() == Path(model).resolve():
        return [f"`output_dir` = {path} is the model itself; name another directory"]
    if target.is_dir() and not (target / WARM_START_MARKER).exists():
        return [f"`output_dir` = {path} exists and is no earlier output of `sft`; name another directory"]
    return folder_problems("output_dir", path)
