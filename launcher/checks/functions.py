"""Whether a dotted path leads to a function, judged from the source: the user's module is not run.

What cannot be told from the source (a module in C, names bound by `import *` or at run time) passes; the function is
imported where it is needed, and judged again there.
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
    """What is wrong with one path; empty if nothing is."""
    module, _, name = path.rpartition(".")
    if not module:
        return f"`{key}` = {path} is no dotted path; write it as package.module.function"
    try:
        spec = find_spec(module)
    except ImportError:
        spec = None
    except Exception as error:  # the border to the user's code: a package runs when a module in it is looked up
        return f"`{key}` = {path}: importing its package failed: {type(error).__name__}: {error}"
    if spec is None:
        return (
            f"`{key}` = {path}: no module `{module}` can be imported; "
            "it is looked up like an import, from the start directory and the environment"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return _in_source(f"`{key}` = {path}", Path(spec.origin), name)


def _in_source(what: str, source: Path, name: str) -> str:
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{what}: {source} is not Python: {error}"
    bound = dict(_bound(tree))
    if "*" in bound or "__getattr__" in bound:
        return ""
    if name not in bound:
        nearest = difflib.get_close_matches(name, [one for one in bound if not one.startswith("_")], n=1)
        hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
        return f"{what}: {source} defines no `{name}`{hint}"
    value = bound[name]
    if isinstance(value, ast.Constant):
        return f"{what}: `{name}` is {value.value!r}, but a function is needed; name one of {source}"
    return ""


def _bound(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that a module binds outside functions and classes, with the expression where it is a plain one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, None
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], None
        elif isinstance(node, ast.Assign):
            names = [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            yield from ((name, node.value if len(names) == 1 else None) for name in names)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        else:
            yield from _bound(node)  # inside `if`, `try`, `with`
