"""Files of others are data: no package reads one that could run code, and nobody unpickles a file by surprise.

Pickles between processes of one run travel through Ray and vLLM; the table names who reads them.
"""

import ast
import io
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from history.lengths.book import LengthBook
from history.store.prompt_store import PromptStore
from history.store.snapshot import Manifest, SnapshotError, SnapshotFile, SnapshotWriter, write_manifest
from history.store.traces import read_traces

ROOT = Path(__file__).resolve().parent.parent
LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
"""Modules whose data can run code."""
BETWEEN_PROCESSES = {
    "rollout/engine/engine.py": "statistics of vLLM's workers",
    "rollout/engine/weights.py": "answers of vLLM's workers",
    "rollout/rewards/worker_server.py": "nothing: it pickles only",
    "rollout/rewards/workers.py": "the server of reward workers, which runs no reward",
    "rollout/transports/cuda_ipc.py": "addresses of device memory, by a trainer rank of the run",
    "rollout/worker/receiver.py": "the channel, from the engine",
    "rollout/worker/worker.py": "calls of the engine",
}
"""Files that unpickle bytes of another process of the run; none reads a file."""
CHECKED_FILES = {
    "megatron_rl/checkpoints/files.py": "`.metadata` of a checkpoint, by an unpickler with a list of what it may name",
    "megatron_rl/cpu/shim.py": "code that this user's ranks have compiled, beside Megatron's source",
}
"""Files that read files which could run code, and why they may."""
ROOMS = ("history", "rollout", "megatron_rl", "launcher")
READS = {"open", "read_bytes", "read_text", "memmap", "fromfile"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Called names without the object before the last dot, except for `load` and `loads`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            yield (text if text.endswith(("load", "loads")) else text.rpartition(".")[2]), node


def test_only_the_listed_files_unpickle_and_none_of_them_reads_a_file() -> None:
    users = {name: tree for name, tree in trees() if imported(tree) & LOADERS}
    assert set(users) == set(BETWEEN_PROCESSES) | set(CHECKED_FILES)
    readers = {name for name, tree in users.items() if {call for call, _ in calls(tree)} & READS}
    assert readers == set(CHECKED_FILES)


def test_the_reader_of_checkpoints_unpickles_by_its_own_list_only() -> None:
    (tree,) = (tree for name, tree in trees() if name == "megatron_rl/checkpoints/files.py")
    loads = {call for call, _ in calls(tree) if call.endswith(("load", "loads"))}
    assert loads == {"_Unpickler(stream).load", "torch.load"}


def unsafe_loads(tree: ast.Module) -> Iterator[str]:
    """Calls that would run what a file contains."""
    safe_yaml = {"yaml.SafeLoader"} | {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["yaml.SafeLoader"]
    }
    for call, node in calls(tree):
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        loader = settings.get("Loader") or "".join(ast.unparse(argument) for argument in node.args[1:2])
        is_unsafe = {
            "np.load": settings.get("allow_pickle") != "False",
            "numpy.load": settings.get("allow_pickle") != "False",
            "torch.load": settings.get("weights_only") != "True",
            "yaml.load": loader not in safe_yaml,
            "load_all": True,
            "yaml.unsafe_load": True,
            "yaml.full_load": True,
        }
        if is_unsafe.get(call, False):
            yield call


def test_numpy_torch_and_yaml_load_files_without_what_could_run() -> None:
    assert [(name, call) for name, tree in trees() for call in unsafe_loads(tree)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("np.load(file)", ["np.load"]),
        ("np.load(file, allow_pickle=False)", []),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("yaml.load(text, yaml.Loader)", ["yaml.load"]),
        ("class Own(yaml.Loader): pass\nyaml.load(text, Loader=Own)", ["yaml.load"]),
        ("class Own(yaml.SafeLoader): pass\nyaml.load(text, Own)", []),
        ("yaml.full_load(text)\nyaml.load_all(text)", ["yaml.full_load", "load_all"]),
    ],
)
def test_the_search_finds_what_could_run(source: str, found: list[str]) -> None:
    assert list(unsafe_loads(ast.parse(source))) == found


class Planted:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.mark,)


def planted_array(mark: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Planted(mark)], dtype=object), allow_pickle=True)
    return file.getvalue()


def test_a_planted_pickle_does_leave_a_mark_where_pickles_are_loaded(tmp_path: Path) -> None:
    np.load(io.BytesIO(planted_array(tmp_path / "mark")), allow_pickle=True)
    assert (tmp_path / "mark").exists()


def test_a_snapshot_with_a_pickle_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "shard-0-000000.history").write_bytes(7 * planted_array(tmp_path / "mark"))
    file = SnapshotFile(name="shard-0-000000.history", shard=0, num_tokens=1, num_bytes=1, checksum="")
    write_manifest(tmp_path, Manifest(fingerprint="f", num_shards=1, last_step=0, files=(file,)))
    store = PromptStore(budget_bytes=1 << 20, kept_steps=1, reuse_share=lambda before, now: 0.0)
    with pytest.raises(SnapshotError, match=r"shard-0-000000\.history: cannot be read .*allow_pickle=False"):
        SnapshotWriter(0, 1).restore(store, tmp_path)
    assert not (tmp_path / "mark").exists()


def test_lengths_and_traces_with_a_pickle_are_refused_and_run_nothing(tmp_path: Path) -> None:
    content = {name: np.array([Planted(tmp_path / "mark")], dtype=object) for name in ("keys", "steps", "counts")}
    np.savez(tmp_path / "lengths.npz", lengths=np.zeros(1), **content)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        LengthBook().load(tmp_path / "lengths.npz")
    (tmp_path / "traces.jsonl").write_bytes(pickle.dumps(Planted(tmp_path / "mark")) + b"\n")
    with pytest.raises(ValueError, match="decode"):
        list(read_traces(tmp_path / "traces.jsonl"))
    assert not (tmp_path / "mark").exists()
