"""Checks that a dotted path names a function, from the source: the user's module is not executed.

Names that the source does not show (a module in C, `import *`, names bound at run time) pass. The process that needs
the function imports and checks it again.
"""

import ast
import difflib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path


def function_problems(paths: Mapping[str, str]) -> list[str]:
    """Problems of dotted paths by configuration key."""
    return [problem for key, path in paths.items() if (problem := _problem(key, path))]


def _problem(key: str, path: str) -> str:
    """Problem of one path; empty if there is none."""
    module, _, name = path.rpartition(".")
    if not module:
        return f"`{key}` = {path} is no dotted path; write package.module.function"
    try:
        spec = find_spec(module)
    except ImportError:
        spec = None
    except Exception as error:  # the lookup executes the user's package
        return f"`{key}` = {path}: importing its package failed: {type(error).__name__}: {error}"
    if spec is None:
        return (
            f"`{key}` = {path}: no module `{module}` can be imported; "
            "put it under the start directory or install it in the environment"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return _in_source(f"`{key}` = {path}", Path(spec.origin), name)


def _in_source(setting: str, source: Path, name: str) -> str:
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{setting}: {source} is not Python: {error}"
    bound = dict(_bound(tree))
    if "*" in bound or "__getattr__" in bound:
        return ""
    if name not in bound:
        nearest = difflib.get_close_matches(name, [other for other in bound if not other.startswith("_")], n=1)
        hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
        return f"{setting}: {source} defines no `{name}`{hint}"
    value = bound[name]
    if isinstance(value, ast.Constant):
        return f"{setting}: `{name}` is {value.value!r}, not a function; name a function of {source}"
    return ""


def _bound(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a module binds outside functions and classes, with the assigned expression if it is a single one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], None
        elif isinstance(node, ast.Assign):
            names = [leaf.id for target in node.targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
            yield from ((name, node.value if len(names) == 1 else None) for name in names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        else:
            yield from _bound(node)  # inside `if`, `try`, `with`
