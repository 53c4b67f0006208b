"""A snapshot restores exactly the saved store, writes only changes, and is refused if a byte is wrong."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from history.store.prompt_store import PromptStore
from history.store.snapshot import (
    MANIFEST,
    Manifest,
    SnapshotError,
    SnapshotWriter,
    check_snapshot,
    read_manifest,
    write_manifest,
)
from tests.support.responses import is_right, visit


def store(**changes) -> PromptStore:
    return PromptStore(**{"budget_bytes": 1 << 30, "kept_steps": 1, "reuse_share": lambda before, now: 0.5, **changes})


def save(folder: Path, stores: list[PromptStore], writers: list[SnapshotWriter], previous: Path | None) -> Path:
    folder.mkdir()
    files = [file for kept, writer in zip(stores, writers, strict=True) for file in writer.save(kept, folder, previous)]
    last_step = max(kept.last_step for kept in stores)
    write_manifest(folder, Manifest(fingerprint="f", num_shards=len(stores), last_step=last_step, files=tuple(files)))
    return folder


def content(*stores: PromptStore) -> dict[int, list[tuple[int, int, str, bytes]]]:
    return {
        key: [(one.step, one.sample, str(one.reward), one.token_ids.tobytes()) for one in past]
        for kept in stores
        for key, (_, past) in kept.fetch(sorted(kept.stamps())).items()
    }


def restored(folder: Path, num_shards: int, **changes) -> list[PromptStore]:
    stores = [store() for _ in range(num_shards)]
    for number, kept in enumerate(stores):
        SnapshotWriter(number, num_shards).restore(kept, folder, **changes)
    return stores


def test_a_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    kept, writer = store(), SnapshotWriter(0, 1)
    kept.append(7, visit(7, 0))
    folder = save(tmp_path / "s", [kept], [writer], None)
    (named,) = read_manifest(folder).files
    (folder / named.name).rename(tmp_path / named.name)
    text = (folder / MANIFEST).read_text().replace(named.name, f"../{named.name}")
    (folder / MANIFEST).write_text(text)
    with pytest.raises(SnapshotError, match=rf"manifest.json: names a file outside its folder \(\.\./{named.name}\)"):
        check_snapshot(folder, "f")


def pay(kept: PromptStore, key: int, step: int) -> None:
    kept.note_rewards(key, step, [0.5] * 4)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_newest_snapshot_equals_the_store_after_any_sequence_of_saves(
    tmp_path_factory, rounds, shards, wanted_shards
):
    base = tmp_path_factory.mktemp("saves")
    stores = [store() for _ in range(shards)]
    writers = [SnapshotWriter(number, shards) for number in range(shards)]
    previous = None
    for step, round_ in enumerate(rounds):
        for key, forget in round_:
            kept = stores[key % shards]
            if forget:
                kept.restore(key, [])
            else:
                kept.append(key, visit(key, step))
                pay(kept, key, step)
        previous = save(base / str(step), stores, writers, previous)
    check_snapshot(previous, "f")
    assert content(*restored(previous, wanted_shards)) == content(*stores)


def test_a_save_writes_only_changes_and_merges_files_that_are_mostly_stale(tmp_path):
    kept, writer = store(), SnapshotWriter(0, 1)
    for key in range(100):
        kept.append(key, visit(key, 0))
    first = save(tmp_path / "0", [kept], [writer], None)
    for key in range(10):
        kept.append(key, visit(key, 1))
        pay(kept, key, 1)
    second = save(tmp_path / "1", [kept], [writer], first)
    (old,) = read_manifest(first).files
    linked, new = read_manifest(second).files
    assert linked == old
    assert (second / old.name).samefile(first / old.name)
    assert new.num_tokens == 10 * 48
    for key in range(60):
        kept.append(key, visit(key, 2))
        pay(kept, key, 2)
    third = save(tmp_path / "2", [kept], [writer], second)
    (merged,) = read_manifest(third).files
    assert merged.num_tokens == 100 * 48
    assert save(tmp_path / "3", [kept], [writer], third).joinpath(merged.name).samefile(third / merged.name)
    assert content(*restored(tmp_path / "3", 1)) == content(kept)


def test_a_save_without_its_predecessor_is_complete(tmp_path):
    kept, writer = store(), SnapshotWriter(0, 1)
    kept.append(1, visit(1, 0))
    save(tmp_path / "0", [kept], [writer], None)
    kept.append(2, visit(2, 0))
    save(tmp_path / "1", [kept], [writer], tmp_path / "gone")
    assert content(*restored(tmp_path / "1", 1)) == content(kept)


def test_a_restored_store_saves_only_changes(tmp_path):
    kept, writer = store(), SnapshotWriter(0, 1)
    for key in range(10):
        kept.append(key, visit(key, 0))
    first = save(tmp_path / "0", [kept], [writer], None)
    again, second_writer = store(), SnapshotWriter(0, 1)
    assert second_writer.restore(again, first) == 10
    again.append(77, visit(77, 1))
    second = save(tmp_path / "1", [again], [second_writer], first)
    old, new = read_manifest(second).files
    assert (second / old.name).samefile(first / old.name)
    assert new.num_tokens == 48
    assert new.name != old.name


def test_existing_visits_of_a_store_count_as_newer_than_a_snapshot(tmp_path):
    kept, writer = store(), SnapshotWriter(0, 1)
    kept.append(1, visit(1, 0))
    kept.append(2, visit(2, 0))
    folder = save(tmp_path / "0", [kept], [writer], None)
    other = store()
    other.append(1, visit(1, 5))
    assert SnapshotWriter(0, 1).restore(other, folder) == 1
    assert {one[0] for one in content(other)[1]} == {5}


def test_another_runs_history_precedes_this_runs_first_step(tmp_path):
    kept, writer = store(), SnapshotWriter(0, 1)
    for key in range(4):
        kept.append(key, visit(key, 100 + key))
        pay(kept, key, 100 + key)
    folder = save(tmp_path / "0", [kept], [writer], None)
    (adopted,) = restored(folder, 1, another_run=True, only={1, 3})
    assert {key: past[0][0] for key, past in content(adopted).items()} == {1: -3, 3: -1}
    adopted.append(3, visit(3, 0))
    pay(adopted, 3, 0)
    assert {one[0] for one in content(adopted)[3]} == {0}


def test_every_changed_byte_is_detected_and_its_file_is_named(tmp_path):
    kept = store()
    kept.append(1, visit(1, 0))
    folder = save(tmp_path / "0", [kept], [SnapshotWriter(0, 1)], None)
    path = folder / read_manifest(folder).files[0].name
    whole = path.read_bytes()
    for position in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SnapshotError, match=path.name):
            check_snapshot(folder, "f")
    path.write_bytes(whole[:-1])
    with pytest.raises(SnapshotError, match=rf"{path.name}: has {len(whole) - 1} bytes"):
        check_snapshot(folder, "f")
    path.unlink()
    with pytest.raises(SnapshotError, match="cannot be read"):
        check_snapshot(folder, "f")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 2, "files": []}', '{"version": 1, "files": [{}]}'])
def test_a_damaged_manifest_is_named(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(SnapshotError, match=MANIFEST):
        check_snapshot(tmp_path, "f")


def test_a_folder_without_a_manifest_is_no_snapshot_and_another_tokenizer_is_refused(tmp_path):
    with pytest.raises(SnapshotError, match=MANIFEST):
        check_snapshot(tmp_path, "f")
    folder = save(tmp_path / "0", [store()], [SnapshotWriter(0, 1)], None)
    with pytest.raises(SnapshotError, match="another tokenizer or vocabulary"):
        check_snapshot(folder, "g")
    assert json.loads((folder / MANIFEST).read_text())["fingerprint"] == "f"


def test_restored_tokens_are_right(tmp_path):
    kept = store()
    kept.append(5, visit(5, 3))
    folder = save(tmp_path / "0", [kept], [SnapshotWriter(0, 1)], None)
    (again,) = restored(folder, 1)
    assert all(is_right(5, one) for one in again.fetch([5])[5][1])
