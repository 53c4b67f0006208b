"""Rules for folders, read from the sources: imports go down only, and the table names users of heavy libraries."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.support.deadline import DEADLINE_S

ROOT = Path(__file__).resolve().parent.parent
LINE = ("history", "rollout", "megatron_rl", "launcher")
"""Data goes right, imports go left."""
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers", "transformer_engine", "wandb", "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A folder without its subfolders, or one file whose rules differ from its folder's."""

    imports: str = ""
    """Floors that its files may import; all of them stand above it in the table."""
    libraries: str = ""
    """Heavy libraries that its files may import, at the top or inside a function."""
    loads: str = ""
    """Heavy libraries that an import of all its modules may load, directly or through others; `*` for any."""


FLOORS = {
    "history": Floor(),
    "history/ray_wait.py": Floor(imports="history", libraries="ray", loads="ray"),
    "history/index": Floor(imports="history"),
    "history/lengths": Floor(imports="history"),
    "history/drafting": Floor(imports="history history/index history/lengths"),
    "history/store": Floor(imports="history"),
    "history/store/actors.py": Floor(
        imports="history history/index history/lengths history/store",
        libraries="ray",
        loads="ray",
    ),
    "history/store/service.py": Floor(
        imports="history history/ray_wait.py history/store history/store/actors.py",
        libraries="ray",
        loads="ray",
    ),
    "history/store/start.py": Floor(
        imports="history history/store/actors.py history/store/service.py",
        libraries="ray",
        loads="ray",
    ),
    "rollout": Floor(imports="history"),
    "rollout/data/chat_template.py": Floor(),
    "rollout/data/tokenizer_file.py": Floor(),
    "rollout/data/tokenizer.py": Floor(
        imports="rollout rollout/data/chat_template.py rollout/data/tokenizer_file.py",
        libraries="transformers",
    ),
    "rollout/data": Floor(imports="rollout rollout/data/chat_template.py rollout/data/tokenizer.py"),
    "rollout/rewards": Floor(
        imports="history history/store rollout rollout/data/tokenizer.py rollout/data",
        libraries="ray",
        loads="ray",
    ),
    "rollout/tracing": Floor(imports="rollout"),
    "rollout/planning": Floor(imports="history history/lengths rollout rollout/data rollout/tracing"),
    "rollout/weights": Floor(imports="rollout", libraries="torch", loads="*"),
    "rollout/weights/checkpoint_tensors.py": Floor(
        imports="rollout rollout/weights",
        libraries="torch transformers",
        loads="*",
    ),
    "rollout/transports": Floor(imports="history rollout rollout/weights", libraries="torch", loads="*"),
    "rollout/cpu": Floor(imports="history rollout/weights", libraries="torch vllm", loads="*"),
    "rollout/worker": Floor(
        imports="history/drafting rollout rollout/tracing rollout/weights rollout/transports rollout/cpu",
        libraries="torch vllm",
        loads="*",
    ),
    "rollout/engine": Floor(
        imports=(
            "history history/drafting history/store rollout rollout/tracing rollout/planning rollout/weights "
            "rollout/weights/checkpoint_tensors.py rollout/transports rollout/worker"
        ),
        libraries="ray vllm",
        loads="*",
    ),
    "rollout/remote_kill.py": Floor(imports="rollout history/ray_wait.py", libraries="ray", loads="ray"),
    "rollout/node_reader.py": Floor(imports="rollout", libraries="ray", loads="ray"),
    "rollout/pool": Floor(
        imports=(
            "history history/lengths history/drafting history/store history/store/service.py rollout "
            "history/ray_wait.py rollout/remote_kill.py rollout/tracing rollout/planning rollout/weights "
            "rollout/transports rollout/engine"
        ),
        libraries="ray",
        loads="ray",
    ),
    "megatron_rl": Floor(imports="history rollout"),
    "megatron_rl/cpu": Floor(imports="history rollout/weights rollout/cpu", libraries="torch", loads="*"),
    "megatron_rl/quantization": Floor(
        imports="rollout/weights rollout/cpu megatron_rl/cpu",
        libraries="torch transformer_engine",
        loads="*",
    ),
    "megatron_rl/model": Floor(
        imports="rollout megatron_rl megatron_rl/quantization",
        libraries="torch megatron transformer_engine",
        loads="*",
    ),
    "megatron_rl/algorithm/guard.py": Floor(imports="megatron_rl"),
    "megatron_rl/algorithm": Floor(imports="history megatron_rl", libraries="torch", loads="*"),
    "megatron_rl/batching": Floor(imports="history rollout megatron_rl megatron_rl/model megatron_rl/algorithm"),
    "megatron_rl/weights": Floor(
        imports=("rollout rollout/weights rollout/transports megatron_rl megatron_rl/quantization megatron_rl/model"),
        libraries="torch",
        loads="*",
    ),
    "megatron_rl/activations.py": Floor(imports="megatron_rl megatron_rl/model"),
    "megatron_rl/memory.py": Floor(
        imports=(
            "rollout rollout/weights megatron_rl megatron_rl/model megatron_rl/weights megatron_rl/activations.py"
        ),
    ),
    "megatron_rl/checkpoints/damage.py": Floor(),
    "megatron_rl/checkpoints": Floor(
        imports="history rollout/weights megatron_rl/checkpoints/damage.py", libraries="torch megatron", loads="*"
    ),
    "megatron_rl/trainer": Floor(
        imports=(
            "history rollout rollout/remote_kill.py rollout/node_reader.py rollout/data rollout/weights "
            "rollout/transports megatron_rl "
            "megatron_rl/cpu megatron_rl/quantization megatron_rl/model megatron_rl/algorithm megatron_rl/batching "
            "megatron_rl/weights megatron_rl/checkpoints megatron_rl/checkpoints/damage.py"
        ),
        libraries="torch megatron ray",
        loads="*",
    ),
    "megatron_rl/controller": Floor(
        imports=(
            "history rollout rollout/planning rollout/weights rollout/transports rollout/pool rollout/engine "
            "megatron_rl megatron_rl/algorithm/guard.py megatron_rl/batching megatron_rl/weights megatron_rl/trainer"
        ),
        loads="ray",
    ),
    "launcher": Floor(),
    "launcher/config": Floor(imports="history rollout megatron_rl launcher"),
    "launcher/metrics": Floor(imports="launcher"),
    "launcher/run_dir/atomic_files.py": Floor(imports="history launcher"),
    "launcher/cluster": Floor(
        imports=(
            "history history/index history/store/service.py history/store/start.py rollout history/ray_wait.py "
            "rollout/remote_kill.py "
            "rollout/data/tokenizer.py rollout/rewards "
            "rollout/transports rollout/pool rollout/engine megatron_rl megatron_rl/trainer "
            "launcher launcher/config launcher/run_dir/atomic_files.py"
        ),
        libraries="ray",
        loads="ray",
    ),
    "launcher/recovery": Floor(
        imports=(
            "rollout rollout/transports rollout/pool rollout/engine megatron_rl/trainer megatron_rl/controller "
            "launcher/cluster"
        ),
        loads="ray",
    ),
    "launcher/estimate": Floor(
        imports=(
            "history/lengths history/store rollout rollout/weights megatron_rl megatron_rl/model megatron_rl/weights "
            "megatron_rl/activations.py megatron_rl/memory.py launcher launcher/config "
            "launcher/run_dir/atomic_files.py launcher/cluster"
        ),
        loads="ray",
    ),
    "launcher/checks": Floor(
        imports=(
            "history/store rollout rollout/data rollout/weights megatron_rl megatron_rl/model "
            "megatron_rl/batching megatron_rl/weights megatron_rl/activations.py megatron_rl/memory.py launcher "
            "launcher/config launcher/cluster launcher/estimate"
        ),
        loads="ray",
    ),
    "launcher/checks/health": Floor(
        imports=(
            "rollout rollout/data/chat_template.py rollout/data/tokenizer.py rollout/data rollout/rewards "
            "launcher/config launcher/cluster launcher/checks"
        ),
        loads="ray",
    ),
    "launcher/run_dir": Floor(
        imports=(
            "history history/store/service.py rollout rollout/rewards rollout/tracing rollout/planning rollout/pool "
            "megatron_rl megatron_rl/algorithm/guard.py megatron_rl/trainer launcher launcher/config launcher/checks "
            "launcher/run_dir/atomic_files.py"
        ),
        libraries="ray wandb",
        loads="ray",
    ),
    "launcher/endings": Floor(
        imports="history rollout megatron_rl/controller launcher launcher/cluster launcher/run_dir",
        loads="ray",
    ),
    "launcher/first_hour/device.py": Floor(
        imports="launcher/run_dir/atomic_files.py launcher/cluster",
        libraries="torch",
        loads="*",
    ),
    "launcher/first_hour": Floor(
        imports="launcher launcher/run_dir/atomic_files.py launcher/estimate launcher/endings",
        loads="ray",
    ),
    "launcher/report": Floor(
        imports=(
            "history/drafting rollout rollout/tracing launcher launcher/metrics launcher/run_dir "
            "launcher/run_dir/atomic_files.py"
        ),
    ),
    "launcher/commands": Floor(
        imports=(
            "history history/index history/lengths history/store history/store/service.py rollout "
            "rollout/data/tokenizer.py rollout/data rollout/planning rollout/weights rollout/pool "
            "rollout/engine megatron_rl megatron_rl/model megatron_rl/algorithm/guard.py megatron_rl/batching "
            "megatron_rl/weights megatron_rl/checkpoints/damage.py "
            "megatron_rl/trainer megatron_rl/controller launcher launcher/config launcher/cluster launcher/recovery "
            "launcher/estimate launcher/checks launcher/checks/health launcher/run_dir "
            "launcher/run_dir/atomic_files.py launcher/endings launcher/report"
        ),
        libraries="ray",
        loads="ray",
    ),
    "launcher/doctor/reference.py": Floor(libraries="torch transformers", loads="*"),
    "launcher/doctor": Floor(
        imports=(
            "rollout rollout/data/tokenizer.py rollout/data megatron_rl/memory.py megatron_rl/controller "
            "launcher/config launcher/cluster launcher/checks launcher/checks/health launcher/run_dir "
            "launcher/run_dir/atomic_files.py launcher/endings launcher/commands launcher/doctor/reference.py"
        ),
        loads="ray",
    ),
    "launcher/cli.py": Floor(
        imports=(
            "launcher launcher/config launcher/cluster launcher/checks launcher/checks/health launcher/run_dir "
            "launcher/endings launcher/commands launcher/doctor launcher/report"
        ),
        loads="ray",
    ),
    "launcher/__main__.py": Floor(imports="launcher/cli.py"),
}
"""The only list of what may import what. `rollout/cpu` and `megatron_rl/cpu` hold what only CPUs need."""

MAX_FILES, MAX_LINES, MAX_PARAMETERS = 20, 60, 6
EXCEPTIONS = {
    "rollout/cpu/fp8_kernels.py:EmulatedFp8Channel.apply_scaled_mm": "vLLM's signature",
    "rollout/cpu/quirks.py:padding_of_a_draft_is_accepted.rejecting_padding": "vLLM's signature",
    "megatron_rl/model/attention.py:PackedAttention.forward": "Megatron's signature",
}
"""Functions beyond `MAX_LINES` or `MAX_PARAMETERS` today; the list may only get shorter."""


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def floor_of(path: Path) -> str:
    name = name_of(path)
    return name if name in FLOORS else name_of(path.parent)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too; no relative import is used."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def libraries(path: Path) -> set[str]:
    return {name.partition(".")[0].removesuffix("_torch") for name in imports(path)} & set(HEAVY)


def imported_files(path: Path) -> set[Path]:
    """Files of our packages that a file imports."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] in LINE:
            whole, parent = ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])
            files = (file for path in (whole, parent) for file in (path.with_suffix(".py"), path / "__init__.py"))
            found.add(next(file for file in files if file.is_file()))
    return found


def loaded_by(modules: list[str]) -> set[str]:
    """Heavy libraries that are there once `modules` are imported."""
    code = f"import {', '.join(modules)}, sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())


@pytest.mark.parametrize("package", LINE)
def test_imports_go_left_only(package: str) -> None:
    right = set(LINE[LINE.index(package) + 1 :])
    tops = {name_of(path): right & {name.partition(".")[0] for name in imports(path)} for path in sources(package)}
    assert {name: wrong for name, wrong in tops.items() if wrong} == {}


def test_packages_do_not_import_tests_benchmarks_or_examples() -> None:
    others = {"tests", "benchmarks", "examples"}
    assert [name_of(path) for path in sources(*LINE) if others & {x.partition(".")[0] for x in imports(path)}] == []


def test_the_table_has_a_row_for_every_folder_and_no_other() -> None:
    assert {floor_of(path) for path in sources(*LINE)} == set(FLOORS)


def test_floors_import_only_floors_above_them_in_the_table() -> None:
    above: set[str] = set()
    for name, floor in FLOORS.items():
        assert set(floor.imports.split()) - above == set(), f"{name} imports floors that do not stand above it"
        above.add(name)


def test_files_import_only_what_their_floor_may() -> None:
    wrong = {
        f"{name_of(path)} -> {name_of(other)}"
        for path in sources(*LINE)
        for other in imported_files(path)
        if floor_of(other) not in {floor_of(path), *FLOORS[floor_of(path)].imports.split()}
    }
    assert wrong == set()


def test_the_table_permits_no_import_that_no_file_makes() -> None:
    """A way that nobody goes any more is walled up."""
    used = {name: set() for name in FLOORS}
    for path in sources(*LINE):
        used[floor_of(path)] |= {floor_of(other) for other in imported_files(path)}
    assert {name: unused for name, floor in FLOORS.items() if (unused := set(floor.imports.split()) - used[name])} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    graphlib.TopologicalSorter({path: imported_files(path) - {path} for path in sources(*LINE)}).prepare()


def test_heavy_libraries_are_imported_only_where_the_table_says() -> None:
    wrong = {
        name_of(path): more
        for path in sources(*LINE)
        if (more := libraries(path) - set(FLOORS[floor_of(path)].libraries.split()))
    }
    assert wrong == {}


@pytest.mark.parametrize("loads", sorted({floor.loads for floor in FLOORS.values()} - {"*"}))
def test_floors_load_only_the_libraries_in_the_table(loads: str) -> None:
    """The controller and the command line run without torch: nothing that they import loads it."""
    paths = [path for path in sources(*LINE) if FLOORS[floor_of(path)].loads == loads and path.name != "__main__.py"]
    modules = [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    assert loaded_by(modules) <= set(loads.split())


@pytest.mark.parametrize("package", LINE)
def test_importing_a_package_has_no_effects(package: str) -> None:
    assert loaded_by([package]) == set()


@pytest.mark.parametrize("room", [*LINE, "benchmarks", "examples", "tests"])
def test_folders_are_small(room: str) -> None:
    folders = {path.parent for path in sources(room)}
    files = {folder: [path for path in folder.glob("*.py") if path.name != "__init__.py"] for folder in folders}
    assert {name_of(folder): len(found) for folder, found in files.items() if len(found) > MAX_FILES} == {}


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions under a node, with the names of all that they stand in."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, child
        yield from functions(child, name)


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without `self`; 0 for constructors, and for numba's kernels, which take arrays and no objects that hold them."""
    kernel = any(isinstance(each, ast.Name) and each.id in ("kernel", "compiled") for each in function.decorator_list)
    if kernel or function.name == "__init__":
        return 0
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(set(names) - {"self", "cls"}) + (given.vararg is not None) + (given.kwarg is not None)


def test_functions_are_short_and_take_few_parameters() -> None:
    found = {
        f"{name_of(path)}:{name}"
        for path in sources(*LINE, "benchmarks", "examples")
        for name, function in functions(tree(path))
        if (function.end_lineno or 0) - function.lineno + 1 > MAX_LINES or num_parameters(function) > MAX_PARAMETERS
    }
    assert found == set(EXCEPTIONS)
