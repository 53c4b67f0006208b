import math
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from history.index.segment import (
    HistorySegment,
    SegmentError,
    attach_segment,
    build_segment,
    check_file,
    file_bytes,
    segment_path,
    write_segment,
)
from history.types import PastResponse


def response(*token_ids: int, sample: int = 0, reward: float = math.nan) -> PastResponse:
    return PastResponse(token_ids=np.array(token_ids, dtype=np.int32), step=3, sample=sample, reward=reward)


def example(version: int = 1) -> HistorySegment:
    return build_segment(77, version, [response(5, 6, 7, reward=0.5), response(5, 6, 8, 9, sample=1)])


def test_an_attached_segment_equals_the_written_one(tmp_path: Path) -> None:
    path = write_segment(tmp_path, example())
    found = attach_segment(tmp_path, 77)
    assert found is not None
    assert path == segment_path(tmp_path, 77)
    assert (found.prompt_key, found.version) == (77, 1)
    first, second = found.past_responses()
    assert (first.token_ids.tolist(), first.step, first.sample, first.reward) == ([5, 6, 7], 3, 0, 0.5)
    assert (second.token_ids.tolist(), second.sample, math.isnan(second.reward)) == ([5, 6, 8, 9], 1, True)
    found.check_integrity()
    check_file(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_attached_arrays_are_read_only(tmp_path: Path) -> None:
    write_segment(tmp_path, example())
    attached = attach_segment(tmp_path, 77)
    assert attached is not None
    for segment in (example(), attached):
        for array in (segment.tokens, segment.order, segment.fences, segment.lengths, segment.rewards):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def test_a_missing_file_gives_no_segment(tmp_path: Path) -> None:
    assert attach_segment(tmp_path, 77) is None


def test_a_newer_version_replaces_the_file_and_readers_keep_the_old_one(tmp_path: Path) -> None:
    write_segment(tmp_path, example())
    old = attach_segment(tmp_path, 77)
    write_segment(tmp_path, build_segment(77, 2, [response(1)]))
    new = attach_segment(tmp_path, 77)
    assert old is not None and new is not None
    assert (old.version, new.version) == (1, 2)
    old.check_integrity()


def test_two_threads_publish_one_prompt_together_and_leave_no_temporary_file(tmp_path: Path) -> None:
    start = threading.Barrier(2)

    def publish(first_version: int) -> None:
        start.wait()
        for version in range(first_version, first_version + 200):
            write_segment(tmp_path, build_segment(77, version, [response(*range(version + 2))]))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(publish, first_version) for first_version in (1, 1001)]:
            done.result()
    found = attach_segment(tmp_path, 77)
    assert found is not None and found.version in (200, 1200)
    found.check_integrity()
    assert [file.name for file in tmp_path.iterdir()] == [segment_path(tmp_path, 77).name]


def test_no_responses_or_empty_ones_give_an_empty_segment(tmp_path: Path) -> None:
    write_segment(tmp_path, build_segment(5, 1, [response()]))
    found = attach_segment(tmp_path, 5)
    assert found is not None
    assert found.past_responses() == []
    found.check_integrity()


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "magic", "header", "other prompt"])
def test_a_damaged_header_or_size_is_refused_and_named(tmp_path: Path, damage: str) -> None:
    path = write_segment(tmp_path, example())
    content = bytearray(path.read_bytes())
    if damage == "magic":
        content[0] ^= 1
    if damage == "header":
        content[20] ^= 1
    changed = {"empty": b"", "cut": content[:-64], "longer": bytes(content) + bytes(64)}.get(damage, content)
    path.write_bytes(changed)
    key = 77
    if damage == "other prompt":
        key = 78
        path.rename(segment_path(tmp_path, key))
    with pytest.raises(SegmentError, match=str(segment_path(tmp_path, key))):
        attach_segment(tmp_path, key)


def test_a_link_and_another_users_file_are_not_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_segment(tmp_path, example())
    real = path.rename(tmp_path / "elsewhere")
    path.symlink_to(real)
    with pytest.raises(SegmentError, match="is a link, or belongs to another user"):
        attach_segment(tmp_path, 77)
    real.rename(path)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(SegmentError, match="is a link, or belongs to another user"):
        attach_segment(tmp_path, 77)


@pytest.mark.parametrize("lengths", [(), (1,), (3, 0, 700), (5000, 1, 1)])
def test_the_size_of_a_file_is_known_before_it_is_built(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    responses = [response(*range(length), sample=sample) for sample, length in enumerate(lengths)]
    size = write_segment(tmp_path, build_segment(77, 1, responses)).stat().st_size
    assert file_bytes(responses) == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def test_the_full_check_detects_every_damaged_byte_of_the_body(tmp_path: Path) -> None:
    path = write_segment(tmp_path, example())
    whole = path.read_bytes()
    for place in range(64, len(whole), 3):
        content = bytearray(whole)
        content[place] ^= 4
        path.write_bytes(content)
        with pytest.raises(SegmentError, match="checksum"):
            check_file(path)


@pytest.mark.parametrize("field", ["tokens", "order", "fences", "starts", "lengths"])
def test_check_integrity_detects_inconsistent_arrays(field: str) -> None:
    arrays = {name: getattr(example(), name) for name in HistorySegment.__slots__}
    arrays[field] = arrays[field].copy()
    arrays[field][0] += 1
    with pytest.raises(SegmentError, match="prompt 000000000000004d"):
        HistorySegment(**arrays).check_integrity()


def test_ids_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match="-3"):
        build_segment(1, 1, [response(5, -3)])


def test_a_large_segment_is_mapped_and_not_read(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 30_000, size=200_000).astype(np.int32)
    write_segment(tmp_path, build_segment(1, 1, [PastResponse(token_ids=tokens, step=0, sample=0)]))
    found = attach_segment(tmp_path, 1)
    assert found is not None
    assert not found.tokens.flags.owndata and not found.order.flags.owndata
    assert found.num_bytes < 9.4 * len(found.tokens)
