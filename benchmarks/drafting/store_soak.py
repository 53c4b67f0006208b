"""A history store under concurrent inserts, evictions and reads; readers check every token.

`python -m benchmarks.drafting.store_soak --json OUT` inserts a million responses from several threads into one store
that has room for a part of them. Other threads fetch prompts, publish them as segments, map the segments and compare
every token with its expected value. Writers visit their prompts in shuffled epochs, so evictions never stop.
"""

import ctypes
import gc
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.harness.record import Goal, arguments, write
from history.index.segment import attach_segment, build_segment, write_segment
from history.lengths.reuse import reusable_share
from history.store.prompt_store import RESPONSE_BYTES, PromptStore
from history.types import PastResponse, TokenIds

NUM_PROMPTS = 2048
SAMPLES = 8
LONGEST = 256
ROOM = 0.4
"""Share of all prompts that fits into the byte budget."""

_SEGMENT_EVERY = 16
_READS_PER_ROUND = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """Counts and memory growth of the run."""

    num_inserts: int
    """Inserted responses."""
    num_reads: int
    """Responses that were read and compared."""
    num_segments: int
    """Segments that were published, mapped, checked and compared."""
    num_evictions: int
    """Evicted prompts."""
    num_wrong_tokens: int
    seconds: float
    growth: float
    """Resident memory at the end minus that after a third of the inserts, over the bytes inserted in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reads:
    num_reads: int = 0
    num_segments: int = 0
    num_wrong: int = 0

    def __add__(self, other: "_Reads") -> "_Reads":
        return _Reads(
            num_reads=self.num_reads + other.num_reads,
            num_segments=self.num_segments + other.num_segments,
            num_wrong=self.num_wrong + other.num_wrong,
        )


def soak(*, num_inserts: int, num_writers: int, num_readers: int, seed: int) -> SoakResult:
    """Run writers and readers in this process; an error in any thread is raised here."""
    budget_bytes = int(ROOM * NUM_PROMPTS * SAMPLES * (RESPONSE_BYTES + 2 * LONGEST))
    store = PromptStore(budget_bytes=budget_bytes, kept_steps=1, reuse_share=reusable_share)
    build_segment(0, 0, [_response(0, 0, 0)])  # compiles first, so that memory for compiling is not counted as growth
    began, done = time.perf_counter(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_writers + num_readers) as threads:
        quotas = [num_inserts // num_writers] * num_writers
        readers = [threads.submit(_read, store, Path(folder), number, seed, done) for number in range(num_readers)]
        early = _written(threads, store, [quota // 3 for quota in quotas], seed)
        early_bytes = _resident_bytes()
        late = _written(threads, store, [quota - quota // 3 for quota in quotas], seed + 1)
        late_bytes = _resident_bytes()
        done.set()
        reads = sum((reader.result() for reader in readers), _Reads())
    store.check_integrity()
    return SoakResult(
        num_inserts=early + late,
        num_reads=reads.num_reads,
        num_segments=reads.num_segments,
        num_evictions=store.stats().num_evictions,
        num_wrong_tokens=reads.num_wrong,
        seconds=time.perf_counter() - began,
        growth=(late_bytes - early_bytes) / (late * (RESPONSE_BYTES + 2 * LONGEST)),
    )


def _written(threads: ThreadPoolExecutor, store: PromptStore, quotas: Sequence[int], seed: int) -> int:
    writers: list[Future[int]] = [
        threads.submit(_write, store, number, len(quotas), quota, seed) for number, quota in enumerate(quotas)
    ]
    return sum(writer.result() for writer in writers)


def _write(store: PromptStore, number: int, num_writers: int, quota: int, seed: int) -> int:
    """Insert `quota` responses of this writer's prompts, in epochs with a new order each."""
    generator = np.random.default_rng([seed, number])
    keys = np.arange(number, NUM_PROMPTS, num_writers)
    step = max(store.last_step, 0)
    written = 0
    while True:
        for key in generator.permutation(keys).tolist():
            if written >= quota:
                return written
            step += 1
            store.append(key, [_response(key, step, sample) for sample in range(SAMPLES)])
            store.note_rewards(key, step, [float(sample) for sample in range(SAMPLES)])
            written += SAMPLES
        store.measure_returns()
        store.drain_returns()


def _read(store: PromptStore, directory: Path, number: int, seed: int, done: threading.Event) -> _Reads:
    """Fetch random prompts and check every token, in some rounds through a segment."""
    generator = np.random.default_rng([seed, 1000 + number])
    total, rounds = _Reads(), 0
    while not done.is_set():
        rounds += 1
        fetched = store.fetch(generator.integers(0, NUM_PROMPTS, _READS_PER_ROUND).tolist())
        total += _Reads(
            num_reads=sum(len(past) for _, past in fetched.values()),
            num_wrong=sum(_num_wrong(key, past) for key, (_, past) in fetched.items()),
        )
        if fetched and rounds % _SEGMENT_EVERY == 0:
            key, (stamp, past) = next(iter(fetched.items()))
            total += _Reads(num_segments=1, num_wrong=_num_wrong(key, _through_a_segment(directory, key, stamp, past)))
        time.sleep(0)
    return total


def _through_a_segment(directory: Path, key: int, stamp: int, past: list[PastResponse]) -> list[PastResponse]:
    """The responses as another process reads them; readers replace each other's files while they are mapped."""
    write_segment(directory, build_segment(key, stamp, past))
    attached = attach_segment(directory, key)
    assert attached is not None
    attached.check_integrity()
    return attached.past_responses()


def _response(key: int, step: int, sample: int) -> PastResponse:
    length = 1 + (key * 31 + step * 17 + sample * 7) % LONGEST
    return PastResponse(token_ids=_token_ids(key, step, sample, length), step=step, sample=sample)


def _token_ids(key: int, step: int, sample: int, length: int) -> TokenIds:
    return ((key * 7919 + step * 101 + sample * 13 + np.arange(length)) % 50_000).astype(np.int32)


def _num_wrong(key: int, past: Sequence[PastResponse]) -> int:
    """Number of wrong tokens; a response of the wrong length counts with all its tokens."""
    wrong = 0
    for response in past:
        right = _response(key, response.step, response.sample).token_ids
        same_length = len(right) == len(response.token_ids)
        wrong += int((right != response.token_ids).sum()) if same_length else len(right)
    return wrong


def _resident_bytes() -> int:
    """Resident bytes, after the allocator has returned the free pages of each thread's heap."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(psutil.Process().memory_info().rss)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak and write the record."""
    options = arguments("A million concurrent inserts, evictions and reads of the history.").parse_args(argv)
    result = soak(num_inserts=50_000 if options.quick else 1_000_000, num_writers=2, num_readers=2, seed=0)
    goals = [
        Goal(name="wrong tokens", value=result.num_wrong_tokens, bound=0, direction="at most", unit="tokens"),
        Goal(name="growth after a third", value=result.growth, bound=0.01, direction="at most", unit="of the inserts"),
    ]
    if not options.quick:
        goals.append(Goal(name="inserts", value=result.num_inserts, bound=1e6, direction="at least", unit="responses"))
    write(options.json, rows=[asdict(result)], goals=goals, not_measured=["several processes"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
