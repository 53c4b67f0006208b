"""Names that cases and stand-ins take from this project exist. CI does not run `make rehearse`, which would find it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.rehearsal.test_rehearsal import CASES
from tests.support.runs.background import ROOT
from tests.support.stub_cuda import stand_ins

OURS = ("history", "rollout", "megatron_rl", "launcher", "tests", "benchmarks", "examples")
FILES = [
    *sorted((ROOT / "tests" / "rehearsal").glob("*.py")),
    *sorted((ROOT / "tests" / "support" / "stub_cuda").rglob("*.py")),
]


@cache
def names_of(module: str) -> frozenset[str]:
    """Names that a module has after its import, and its submodules; empty if there is no such module."""
    path = ROOT / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    if not files:
        return frozenset()
    tree = ast.parse(files[0].read_text(encoding="utf-8"))
    found = {entry.stem for entry in path.iterdir()} if path.is_dir() else set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return frozenset(found | {"__doc__"})


def taken(file: Path) -> Iterator[tuple[str, str]]:
    """Modules of this project that a file imports, and the names that it takes from them."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "__doc__") for alias in node.names if alias.name.partition(".")[0] in OURS)


def test_every_name_that_a_case_takes_exists() -> None:
    found = [(file.name, module, name) for file in FILES for module, name in taken(file)]
    assert len(found) > 50
    assert not [entry for entry in found if entry[2] not in names_of(entry[1])]


def test_what_is_stood_in_for_exists() -> None:
    tree = ast.parse(Path(stand_ins.__file__).read_text(encoding="utf-8"))
    bodies = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for module, installer in stand_ins.INSTALLERS.items():
        if module.partition(".")[0] in OURS:
            used = {
                node.attr
                for node in ast.walk(bodies[installer.__name__])
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "module"
            }
            assert names_of(module) and used <= names_of(module), (module, used - names_of(module))


def test_every_case_has_its_script() -> None:
    assert {case.script for case in CASES.values()} == {
        file.stem for file in (ROOT / "tests" / "rehearsal").glob("*_case.py")
    }
