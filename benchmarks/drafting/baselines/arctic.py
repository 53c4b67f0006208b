"""Suffix decoding of Arctic Inference 0.3.0, called as vLLM's method `suffix` calls it.

`python -m benchmarks.drafting.baselines.arctic --build build/arctic` downloads the source distribution and compiles
only its suffix trees into that directory (needs cmake and a C++20 compiler, takes half a minute). Nothing is installed,
because the whole package would patch vLLM. Needs the network, or a pip configuration that replaces it.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.drafting.baselines.replay import Longs
from history.store.traces import Trace
from history.types import TokenIds


class _Draft(Protocol):
    token_ids: list[int]
    probs: list[float]
    """Probability that each token and all before it are right."""


class _Tree(Protocol):
    def estimate_memory(self) -> int: ...


class _Cache(Protocol):
    _global_tree: _Tree

    def start_request(self, req_id: int, prompt_token_ids: TokenIds) -> None: ...

    def stop_request(self, req_id: int) -> None: ...

    def add_active_response(self, req_id: int, token_ids: TokenIds) -> None: ...

    def speculate(
        self, req_id: int, context: TokenIds, *, max_spec_tokens: int, max_spec_factor: float, min_token_prob: float
    ) -> _Draft: ...


class Suffixes(Protocol):
    """The used part of `arctic_inference.suffix_decoding`."""

    def SuffixDecodingCache(self, max_tree_depth: int, max_cached_requests: int) -> _Cache:  # noqa: N802
        """A cache of trees with that depth; -1 requests: no limit."""


VERSION = "0.3.0"
NANOBIND = "nanobind==2.9.2"
DIRECTORY = Path("build/arctic")
_PACKAGE = "arctic_inference"
_FOLDER = Path(_PACKAGE) / "suffix_decoding"


def build(directory: Path) -> None:
    """Download and compile an importable package into `directory`."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        sdist = [*pip, "download", f"arctic-inference=={VERSION}", "--no-deps", "--no-binary=:all:"]
        subprocess.run([*sdist, "--no-build-isolation", f"--dest={work}"], check=True)
        subprocess.run([*pip, "install", NANOBIND, f"--target={work / 'nanobind'}"], check=True)
        with tarfile.open(next(work.glob("arctic*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(path for path in work.glob("arctic*") if path.is_dir())
        configure = ["cmake", str(source / "csrc" / "suffix_decoding"), f"-DPython_EXECUTABLE={sys.executable}"]
        beside = Path(sys.executable).parent
        environment = {
            "PYTHONPATH": str(work / "nanobind"),
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }
        for command in ([*configure, "-DCMAKE_BUILD_TYPE=Release", "-B", str(work)], ["cmake", "--build", str(work)]):
            subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        (directory / _FOLDER).mkdir(parents=True, exist_ok=True)
        shutil.copy(source / _PACKAGE / "__init__.py", directory / _PACKAGE)
        for file in (*(source / _FOLDER).glob("*.py"), *work.glob("_C*.so")):
            shutil.copy(file, directory / _FOLDER)


def load(directory: Path) -> Suffixes | None:
    """What was built there, or None."""
    if not list((directory / _FOLDER).glob("_C*.so")):
        return None
    sys.path.insert(0, str(directory.resolve()))
    try:
        module: Suffixes = importlib.import_module(f"{_PACKAGE}.suffix_decoding.cache")  # type: ignore[assignment]
        return module
    finally:
        sys.path.remove(str(directory.resolve()))


class Arctic:
    """A `SuffixDecodingCache`; with `per_prompt`, one per prompt."""

    def __init__(
        self,
        module: Suffixes,
        *,
        max_draft_tokens: int,
        depth: int = 24,
        factor: float = 1.0,
        min_probability: float = 0.1,
        per_prompt: bool = False,
    ) -> None:
        self._module = module
        self._max_draft_tokens = max_draft_tokens
        self._depth = depth
        self._factor = factor
        self._min_probability = min_probability
        self._per_prompt = per_prompt
        self._caches: dict[str, _Cache] = {}
        self._open: dict[int, tuple[_Cache, int]] = {}
        self._decoded: set[tuple[str, int, int]] = set()
        self._num_requests = 0
        self.survivals: Sequence[Sequence[float]] = ()

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Add each response as a finished request, unless it was decoded here and is in the cache already."""
        cache = self._cache(prompt_id)
        for trace in visit:
            if _name(trace) in self._decoded:
                continue
            draft_row = self.open(trace, 0)
            cache.add_active_response(draft_row, trace.response_ids)
            self.close(draft_row)

    def open(self, trace: Trace, max_length: int) -> int:
        """Begin a request with a tree of its own."""
        draft_row = self._num_requests
        self._num_requests += 1
        cache = self._cache(trace.prompt_id)
        cache.start_request(draft_row, trace.prompt_ids)
        self._open[draft_row] = cache, len(trace.prompt_ids)
        self._decoded.add(_name(trace))
        return draft_row

    def close(self, draft_row: int) -> None:
        """End a request: its tree is deleted, its response stays in the cache."""
        self._open.pop(draft_row)[0].stop_request(draft_row)

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        """Append the new tokens and speculate, row by row."""
        drafts: list[list[int]] = []
        survivals: list[list[float]] = []
        for row, (draft_row, end, room) in enumerate(
            zip(draft_rows.tolist(), num_tokens.tolist(), rooms.tolist(), strict=True)
        ):
            cache, seen = self._open[draft_row]
            text = token_ids[row]
            cache.add_active_response(draft_row, text[seen:end])
            self._open[draft_row] = cache, end
            draft = cache.speculate(
                draft_row,
                text[max(0, end - self._depth) : end],
                max_spec_tokens=min(self._max_draft_tokens, room),
                max_spec_factor=self._factor,
                min_token_prob=self._min_probability,
            )
            drafts.append(draft.token_ids)
            survivals.append(draft.probs)
        self.survivals = survivals
        return drafts

    def num_bytes(self) -> int:
        """Bytes by the trees' own estimate."""
        return sum(cache._global_tree.estimate_memory() for cache in self._caches.values())

    def _cache(self, prompt_id: str) -> _Cache:
        key = prompt_id if self._per_prompt else ""
        if key not in self._caches:
            self._caches[key] = self._module.SuffixDecodingCache(self._depth, -1)
        return self._caches[key]


def _name(trace: Trace) -> tuple[str, int, int]:
    return trace.prompt_id, trace.step, trace.sample


def main(argv: Sequence[str] | None = None) -> int:
    """Build the suffix trees."""
    parser = argparse.ArgumentParser(description=f"Build the suffix trees of Arctic Inference {VERSION}.")
    parser.add_argument("--build", type=Path, default=DIRECTORY)
    options = parser.parse_args(argv)
    build(options.build)
    print(f"{options.build}: {'built' if load(options.build) else 'not built'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
