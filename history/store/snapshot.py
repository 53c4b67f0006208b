"""Snapshots of the history in checkpoints: immutable, incremental files with checksums.

A folder holds `manifest.json` and files of responses. Every save writes the changes since the last save as one new file
per shard, and hard-links the older files from the previous folder. A file with less than half of its tokens current is
merged into the new one. A save therefore writes changes only, and a folder is at most twice as large as its current
responses.

Invariants: a written file never changes. A prompt's responses are those of the newest file that holds the prompt, if
the newest file of its shard lists the prompt as alive. A folder without a manifest is no snapshot. The manifest holds
the checksum of every file.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from history.own_files import opener
from history.store.prompt_store import PromptStore
from history.store.response_batch import ResponseBatch
from history.types import PastResponse

MANIFEST = "manifest.json"
_VERSION = 1
_CHUNK_BYTES = 1 << 24


class SnapshotError(RuntimeError):
    """A snapshot cannot be used; the message names the file and the fault."""


class OtherTokenizerError(SnapshotError):
    """A snapshot is intact, but its token ids belong to another tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFile:
    """One file of responses."""

    name: str
    shard: int
    num_tokens: int
    num_bytes: int
    checksum: str
    """xxh3, 128 bits, of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Contents of a snapshot."""

    fingerprint: str
    """Of the tokenizer and its vocabulary."""
    num_shards: int
    last_step: int
    """Newest step of all responses; -1 without responses."""
    files: tuple[SnapshotFile, ...]
    """Older before newer."""


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a folder of files a snapshot."""
    text = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1) + "\n"
    partial = folder / f"{MANIFEST}.partial"
    with open(partial, "w", encoding="utf-8", opener=opener) as file:
        file.write(text)
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a snapshot. Raises SnapshotError."""
    path = folder / MANIFEST
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
        version = row.pop("version")
        if version != _VERSION:
            raise SnapshotError(f"{path}: is of version {version}, this program reads {_VERSION}")
        files = tuple(SnapshotFile(**file) for file in row.pop("files"))
        if outside := [file.name for file in files if Path(file.name).name != file.name]:
            raise SnapshotError(f"{path}: names a file outside its folder ({outside[0]})")
        return Manifest(files=files, **row)
    except FileNotFoundError as error:
        raise SnapshotError(f"{folder}: holds no {MANIFEST}") from error
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise SnapshotError(f"{path}: is damaged ({error!r})") from error


def check_snapshot(folder: Path, fingerprint: str) -> Manifest:
    """Check all files and the tokenizer of a snapshot, and return its manifest.

    Raises SnapshotError naming the first damaged file, or OtherTokenizerError.
    """
    manifest = read_manifest(folder)
    if manifest.fingerprint != fingerprint:
        raise OtherTokenizerError(
            f"{folder}: was made with another tokenizer or vocabulary ({manifest.fingerprint}, here {fingerprint})"
        )
    for file in manifest.files:
        _check_file(folder / file.name, file)
    return manifest


def _check_file(path: Path, file: SnapshotFile) -> None:
    digest = xxhash.xxh3_128()
    try:
        if path.stat().st_size != file.num_bytes:
            raise SnapshotError(f"{path}: has {path.stat().st_size} bytes, the manifest says {file.num_bytes}")
        with path.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read ({error})") from error
    if digest.hexdigest() != file.checksum:
        raise SnapshotError(f"{path}: is damaged, its checksum is not the manifest's")


def read_responses(
    folder: Path, manifest: Manifest, *, shard: int, num_shards: int
) -> Iterator[tuple[str, dict[int, list[PastResponse]]]]:
    """Yield name and current prompts of each file, newest first, for `shard` of `num_shards`.

    Raises SnapshotError naming the unreadable file.
    """
    by_shard: dict[int, list[SnapshotFile]] = defaultdict(list)
    for file in manifest.files:
        if manifest.num_shards != num_shards or file.shard == shard:
            by_shard[file.shard].append(file)
    for files in by_shard.values():
        missing: set[int] | None = None
        for file in reversed(files):
            alive, batch = _read(folder / file.name)
            if missing is None:
                missing = {key for key in alive.tolist() if key % num_shards == shard}
            newest = {key: responses for key, responses in batch.by_prompt().items() if key in missing}
            missing -= newest.keys()
            yield file.name, newest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    stamp: int
    """Stamp in the store when the prompt was written."""
    name: str
    """File that holds the prompt."""
    num_tokens: int


class SnapshotWriter:
    """Saves the changes of one store, snapshot by snapshot."""

    def __init__(self, shard: int, num_shards: int) -> None:
        self._shard = shard
        self._num_shards = num_shards
        self._files: dict[str, SnapshotFile] = {}
        self._saved: dict[int, _Saved] = {}
        self._num_written = 0

    def restore(
        self, store: PromptStore, folder: Path, *, another_run: bool = False, only: Collection[int] | None = None
    ) -> int:
        """Fill `store` with this shard's part of a snapshot; return the number of prompts.

        Args:
            store: receives the prompts that it does not hold yet.
            folder: a snapshot.
            another_run: the snapshot is another run's; its steps become negative and precede this run's steps.
            only: prompts to restore; None restores all.

        Raises SnapshotError.
        """
        manifest = read_manifest(folder)
        shift = manifest.last_step + 1 if another_run else 0
        count = 0
        stored = store.stamps()
        is_ours = manifest.num_shards == self._num_shards and not another_run and only is None
        for name, prompts in read_responses(folder, manifest, shard=self._shard, num_shards=self._num_shards):
            for key, responses in prompts.items():
                if key in stored or (only is not None and key not in only):
                    continue
                store.restore(key, [replace(response, step=response.step - shift) for response in responses])
                count += 1
                if is_ours:
                    self._note(store, key, name, responses)
        if is_ours:
            self._files = {file.name: file for file in manifest.files if file.shard == self._shard}
            self._num_written = max((_number(name) for name in self._files), default=-1) + 1
        return count

    def save(self, store: PromptStore, folder: Path, previous: Path | None) -> list[SnapshotFile]:
        """Write the store into `folder`, link the files of `previous`, and return all files, older before newer."""
        stamps = store.stamps()
        removed = self._saved.keys() - stamps.keys()
        self._saved = {key: saved for key, saved in self._saved.items() if stamps.get(key) == saved.stamp}
        before = len(self._files)
        current: Counter[str] = Counter()
        for saved in self._saved.values():
            current[saved.name] += saved.num_tokens
        self._files = {
            name: file
            for name, file in self._files.items()
            if previous is not None and 2 * current[name] > file.num_tokens and _link(name, folder, previous)
        }
        self._saved = {key: saved for key, saved in self._saved.items() if saved.name in self._files}
        changed = [key for key in stamps if key not in self._saved]
        if changed or removed or len(self._files) < before:
            self._write(store, changed, folder)
        return list(self._files.values())

    def _write(self, store: PromptStore, prompt_keys: list[int], folder: Path) -> None:
        prompts = store.fetch(prompt_keys)
        batch = ResponseBatch.of((key, response) for key, (_, past) in prompts.items() for response in past)
        alive = np.array(list(store.stamps()), dtype=np.int64)
        name = f"shard-{self._shard}-{self._num_written:06d}.history"
        self._num_written += 1
        self._files[name] = _write_file(folder / name, self._shard, alive, batch)
        for key, (stamp, past) in prompts.items():
            self._saved[key] = _Saved(stamp=stamp, name=name, num_tokens=_num_tokens(past))

    def _note(self, store: PromptStore, key: int, name: str, responses: list[PastResponse]) -> None:
        """Record that a restored prompt needs no new file, unless the store has evicted it at once."""
        for stamp, _ in store.fetch([key]).values():
            self._saved[key] = _Saved(stamp=stamp, name=name, num_tokens=_num_tokens(responses))


def _link(name: str, folder: Path, previous: Path) -> bool:
    """Link a file into `folder`; return False if the file is gone."""
    try:
        os.link(previous / name, folder / name)
    except OSError:
        return False
    return True


def _num_tokens(responses: list[PastResponse]) -> int:
    return sum(len(response.token_ids) for response in responses)


def _number(name: str) -> int:
    return int(name.removesuffix(".history").rpartition("-")[2])


def _write_file(path: Path, shard: int, alive: npt.NDArray[np.int64], batch: ResponseBatch) -> SnapshotFile:
    with open(path, "wb", opener=opener) as file:
        for array in (alive, *batch.arrays):
            np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())  # here: on a shared file system the launcher's sync does not reach this node's cache
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return SnapshotFile(
        name=path.name,
        shard=shard,
        num_tokens=len(batch.token_ids),
        num_bytes=path.stat().st_size,
        checksum=digest.hexdigest(),
    )


def _read(path: Path) -> tuple[npt.NDArray[np.int64], ResponseBatch]:
    try:
        with path.open("rb") as file:
            alive, keys, steps, samples, rewards, lengths, tokens = (
                np.load(file, allow_pickle=False) for _ in range(7)
            )
    except (OSError, ValueError, EOFError) as error:
        raise SnapshotError(f"{path}: cannot be read ({error})") from error
    return alive, ResponseBatch(
        prompt_keys=keys, steps=steps, samples=samples, rewards=rewards, lengths=lengths, token_ids=tokens
    )
