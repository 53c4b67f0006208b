"""One prompt's past responses with their index: an immutable file in shared memory, attached without a copy.

A rename replaces a prompt's segment by a newer version; processes that map the old file keep it. Attaching reads the
header only (12-30 us at any size); `check_integrity` reads the whole file.

Invariants: `tokens` holds each response after a `SEPARATOR`, and `END` last. `order` is a permutation of all positions,
sorted by left context (`history.index.suffix_array`). A file with its final name is complete. 9.2 bytes a token.
"""

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from history.index.suffix_array import END, SEPARATOR, build_fences, is_sorted, num_fences, sort_by_left_context
from history.own_files import open_own
from history.types import PastResponse, TokenIds

_HEADER = struct.Struct("<8sqqqqQQ")
"""Magic, prompt key, version, tokens, responses, checksum of the body, checksum of the header before it."""

_MAGIC = b"HISTSEG2"
_NUM_TABLES = 5
_ALIGNMENT = 64

Numbers = npt.NDArray[np.int32]


class SegmentError(RuntimeError):
    """A segment is damaged; the message names the file (or prompt) and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistorySegment:
    """R past responses of a prompt and their index; n = sum of lengths + R + 1. All arrays are read-only."""

    prompt_key: int
    version: int
    """Increases with every rebuild of the prompt's segment."""
    tokens: TokenIds
    """[n], int32"""
    order: Numbers
    """[n], int32: positions of `tokens`, sorted by left context."""
    fences: npt.NDArray[np.int64]
    """Search tree over `order` (`history.index.suffix_array`), about n / 7 numbers."""
    starts: Numbers
    """[R], int32: position of each response's first token."""
    lengths: Numbers
    """[R], int32"""
    steps: Numbers
    """[R], int32: step that sampled the response."""
    samples: Numbers
    """[R], int32: index of the response within its group."""
    rewards: npt.NDArray[np.float32]
    """[R]; NaN until scored."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._arrays())

    def past_responses(self) -> list[PastResponse]:
        """Return the indexed responses; their tokens are views."""
        return [
            PastResponse(
                token_ids=self.tokens[start : start + length],
                step=int(self.steps[i]),
                sample=int(self.samples[i]),
                reward=float(self.rewards[i]),
            )
            for i, (start, length) in enumerate(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))
        ]

    def check_integrity(self) -> None:
        """Check every token: separators between responses, no negative ids, a sorted permutation.

        Raises SegmentError.
        """
        name = f"segment of prompt {self.prompt_key:016x}, version {self.version}"
        if len(self.tokens) != len(self.order) or int(self.lengths.sum()) + len(self.lengths) + 1 != len(self.tokens):
            raise SegmentError(f"{name}: {len(self.tokens)} tokens do not hold {len(self.lengths)} responses")
        if not np.array_equal(self.tokens, _joined(self.past_responses())) or (self.tokens < END).any():
            raise SegmentError(f"{name}: responses are not separated as their starts and lengths say")
        if int((self.tokens < 0).sum()) != len(self.lengths) + 1:
            raise SegmentError(f"{name}: a negative id inside a response")
        if not np.array_equal(np.sort(self.order), np.arange(len(self.order))):
            raise SegmentError(f"{name}: the order is not a permutation")
        if not is_sorted(self.tokens, self.order):
            raise SegmentError(f"{name}: the order is not sorted")
        if not np.array_equal(self.fences, build_fences(self.tokens, self.order)):
            raise SegmentError(f"{name}: the fences are not those of the order")

    def _arrays(self) -> tuple[npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.int64], ...]:
        tables = (self.starts, self.lengths, self.steps, self.samples, self.rewards)
        return (*tables, self.tokens, self.order, self.fences)


def build_segment(prompt_key: int, version: int, responses: Sequence[PastResponse]) -> HistorySegment:
    """Index `responses` without the empty ones. Compiled code does all but the copying, without the interpreter's lock.

    Raises ValueError when a token id is negative.
    """
    non_empty = [response for response in responses if len(response.token_ids)]
    lengths = np.array([len(response.token_ids) for response in non_empty], dtype=np.int32)
    starts = (np.cumsum(lengths + 1) - lengths).astype(np.int32)
    least = min((int(response.token_ids.min()) for response in non_empty), default=0)
    if least < 0:
        raise ValueError(f"token id {least} of prompt {prompt_key:016x}: ids are not negative")
    tokens = _joined(non_empty)
    order = sort_by_left_context(tokens)
    fences = build_fences(tokens, order)
    arrays = {
        "tokens": tokens,
        "order": order,
        "starts": starts,
        "lengths": lengths,
        "steps": np.array([response.step for response in non_empty], dtype=np.int32),
        "samples": np.array([response.sample for response in non_empty], dtype=np.int32),
    }
    rewards = np.array([response.reward for response in non_empty], dtype=np.float32)
    segment = HistorySegment(prompt_key=prompt_key, version=version, fences=fences, rewards=rewards, **arrays)
    for array in segment._arrays():
        array.flags.writeable = False
    return segment


def file_bytes(responses: Sequence[PastResponse]) -> int:
    """Bytes of shared memory of the file of a segment with these responses, in whole pages."""
    lengths = [len(response.token_ids) for response in responses if len(response.token_ids)]
    size = sum(map(_aligned, (_HEADER.size, *_array_bytes(sum(lengths) + len(lengths) + 1, len(lengths)))))
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def segment_path(directory: Path, prompt_key: int) -> Path:
    """Path of a prompt's segment in a node's folder of segments."""
    return directory / f"{prompt_key:016x}.segment"


def write_segment(directory: Path, segment: HistorySegment) -> Path:
    """Publish `segment` in `directory`: write a temporary file, then rename it over the older version.

    The temporary file is named by process and thread, so that several writers of one prompt do not share it.
    """
    path = segment_path(directory, segment.prompt_key)
    temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
    body = _body(segment)
    checksum = xxhash.xxh3_64()
    for part in body:
        checksum.update(part)
    header = _header(segment, checksum.intdigest())
    with ExitStack() as undo:
        undo.callback(temporary.unlink, missing_ok=True)
        with temporary.open("wb", buffering=0) as file:
            for part in (header, *body):
                file.write(part)
        temporary.rename(path)
        undo.pop_all()
    return path


def attach_segment(directory: Path, prompt_key: int) -> HistorySegment | None:
    """Map the prompt's segment read-only; None if there is no file.

    Raises SegmentError naming the file if its header or size is wrong, or if it is a link or another user's: only the
    owner may shorten a mapped file.
    """
    path = segment_path(directory, prompt_key)
    try:
        file = open_own(path)
    except FileNotFoundError:
        return None
    if file is None:
        raise SegmentError(f"{path}: is a link, or belongs to another user")
    try:
        size = os.fstat(file).st_size
        if size < _HEADER.size:
            raise SegmentError(f"{path}: {size} bytes are too few for a segment")
        mapped = mmap.mmap(file, size, access=mmap.ACCESS_READ)
    finally:
        os.close(file)
    return _view(path, mapped, prompt_key)


def check_file(path: Path) -> None:
    """Read and check the whole file of a segment. Raises SegmentError naming the file."""
    try:
        segment = attach_segment(path.parent, int(path.stem, 16))
    except ValueError as error:
        raise SegmentError(f"{path}: not the name of a segment") from error
    if segment is None:
        raise SegmentError(f"{path}: no such file")
    content = path.read_bytes()
    if xxhash.xxh3_64_intdigest(content[_HEADER.size :]) != _HEADER.unpack_from(content)[5]:
        raise SegmentError(f"{path}: its checksum does not match its content")
    segment.check_integrity()


def _joined(responses: Sequence[PastResponse]) -> TokenIds:
    separator = np.array([SEPARATOR], dtype=np.int32)
    parts = [part for response in responses for part in (separator, response.token_ids)]
    return np.concatenate([*parts, np.array([END], dtype=np.int32)], dtype=np.int32)


def _header(segment: HistorySegment, checksum: int) -> bytes:
    fields = (_MAGIC, segment.prompt_key, segment.version, len(segment.tokens), len(segment.lengths), checksum)
    unsigned = _HEADER.pack(*fields, 0)[:-8]
    return _HEADER.pack(*fields, xxhash.xxh3_64_intdigest(unsigned))


def _body(segment: HistorySegment) -> list[memoryview | bytes]:
    parts: list[memoryview | bytes] = []
    for array in segment._arrays():
        parts.append(array.data.cast("B") if len(array) else b"")
        parts.append(bytes(-array.nbytes % _ALIGNMENT))
    return [bytes(-_HEADER.size % _ALIGNMENT), *parts]


def _view(path: Path, mapped: mmap.mmap, prompt_key: int) -> HistorySegment:
    magic, key, version, num_tokens, num_responses, _, signature = _HEADER.unpack_from(mapped)
    if magic != _MAGIC or signature != xxhash.xxh3_64_intdigest(mapped[: _HEADER.size - 8]):
        raise SegmentError(f"{path}: its header is damaged")
    if key != prompt_key:
        raise SegmentError(f"{path}: holds prompt {key:016x}")
    sizes = [num_responses] * _NUM_TABLES + [num_tokens] * 2
    widths = _array_bytes(num_tokens, num_responses)
    offsets = np.cumsum([_aligned(_HEADER.size), *map(_aligned, widths)]).tolist()
    if offsets[-1] != len(mapped):
        raise SegmentError(f"{path}: {len(mapped)} bytes where its header says {offsets[-1]}")
    numbers = [np.frombuffer(mapped, np.int32, size, offset) for size, offset in zip(sizes, offsets, strict=False)]
    starts, lengths, steps, samples, rewards, tokens, order = numbers
    return HistorySegment(
        prompt_key=prompt_key,
        version=version,
        tokens=tokens,
        order=order,
        fences=np.frombuffer(mapped, np.int64, num_fences(num_tokens), offsets[-2]),
        starts=starts,
        lengths=lengths,
        steps=steps,
        samples=samples,
        rewards=rewards.view(np.float32),
    )


def _array_bytes(num_tokens: int, num_responses: int) -> list[int]:
    """Bytes of each array of a segment."""
    return [4 * num_responses] * _NUM_TABLES + [4 * num_tokens] * 2 + [8 * num_fences(num_tokens)]


def _aligned(num_bytes: int) -> int:
    return num_bytes + -num_bytes % _ALIGNMENT
