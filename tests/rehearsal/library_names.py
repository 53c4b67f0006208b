"""Names that files take from libraries, also within functions: as attributes of modules and classes.

Attributes of instances are not looked for: only code that runs can tell them.
"""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

LIBRARIES = ("vllm", "megatron", "transformer_engine", "torch")
DYNAMIC = "torch:ops"
"""Filled when a library registers its operations."""


def names_taken(file: Path) -> set[str]:
    """Names of `LIBRARIES` in a file, as module and attributes: `torch:cuda.Stream`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imported = dict(_imports(tree))
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound = {name: path for name, path in imported.items() if name not in stored}
    chains = {chain for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (chain := _chain(node, bound))}
    found = {*imported.values(), *chains}
    return {name for name in found if not name.startswith(DYNAMIC)}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Names that a file binds by imports, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _is_of_library(node.module):
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_library(alias.name):
                    root = alias.name.partition(".")[0]
                    yield (alias.asname, f"{alias.name}:") if alias.asname else (root, f"{root}:")


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _chain(node: ast.expr, bound: dict[str, str]) -> str:
    """The name of an attribute whose first part is bound; otherwise empty."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = _chain(node.value, bound)
        return before and f"{before}{'' if before.endswith(':') else '.'}{node.attr}"
    return ""


def is_missing(name: str) -> bool:
    """Whether there is no such module, or a module or a class on the way lacks the next part."""
    path, _, attributes = name.partition(":")
    try:
        found: object = importlib.import_module(path)
    except ModuleNotFoundError:
        return True
    for part in filter(None, attributes.split(".")):
        if not isinstance(found, ModuleType | type):
            return False
        if not _has(found, part):
            return True
        found = getattr(found, part, None)
    return False


def _has(owner: ModuleType | type, part: str) -> bool:
    if hasattr(owner, part):
        return True
    if isinstance(owner, type):
        return any(part in inspect.get_annotations(base) for base in owner.__mro__)
    try:
        importlib.import_module(f"{owner.__name__}.{part}")
    except ModuleNotFoundError:
        return False
    return True
