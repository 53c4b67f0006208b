"""Time and memory of drafting, and the speed of a modelled engine whose forward time is given by a formula.

Times are CPU times of the calling thread and medians over forwards. Compared methods alternate forward by forward, in
the middle of their responses. Python code around a method counts where an engine would run it too.
"""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.drafting.baselines.product import Product
from benchmarks.drafting.baselines.replay import Forward, Method, Replay
from benchmarks.drafting.quality import Contestant, K, by_prompt, ours, remember, replay_of
from benchmarks.harness.record import Row
from history.drafting.forward_cost import ForwardCostModel
from history.index.segment import attach_segment, build_segment, write_segment
from history.store.traces import Trace
from history.types import PastResponse

CONTEXT_TOKENS = 6000
"""Context of each request of the modelled engine."""
SURFACE = (
    "forward ms = 10 + 0.04 tokens + 2.7e-5 context tokens (6,000 a row); drafts of peers cost no time, ours their own"
)


def forward_s(num_rows: int, num_tokens: int) -> float:
    """Seconds of a forward by SURFACE, inferred for a 32B model in FP8 on one H200."""
    return (10.0 + 0.04 * num_tokens + 2.7e-5 * CONTEXT_TOKENS * num_rows) / 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A method with the history of a visit, and the row of its insert."""

    contestant: Contestant
    method: Method
    row: Row


def load(case: str, contestant: Contestant, old: Sequence[Trace]) -> Loaded:
    """Insert all responses of a visit; the row has nanoseconds and bytes per token."""
    method = contestant.make()
    num_tokens = sum(len(trace.response_ids) for trace in old)
    # a first method compiles the kernels
    remember(method, [trace for _, responses in itertools.islice(by_prompt(old), 1) for trace in responses])
    method = contestant.make()
    began = time.thread_time()
    remember(method, old)
    seconds = time.thread_time() - began
    row: dict[str, str | int | float | bool] = {
        "what": "insert",
        "case": case,
        "method": contestant.name,
        "tokens": num_tokens,
        "ns_per_token": round(1e9 * seconds / num_tokens, 1),
        "bytes_per_token": round(method.num_bytes() / num_tokens, 2),
    }
    if isinstance(method, Product):
        row["ns_per_token"] = round(1e9 * method.build_s / num_tokens, 1)
        row["ns_per_token_written"] = round(1e9 * method.write_s / num_tokens, 1)
    return Loaded(contestant=contestant, method=method, row=row)


def propose_rows(
    case: str, loaded: Sequence[Loaded], new: Sequence[Trace], batch: int, *, rounds: int
) -> Iterator[Row]:
    """Drafting time per request and forward; methods alternate."""
    replays = [
        Replay(
            entry.method,
            new[:batch],
            batch=batch,
            max_draft_tokens=entry.contestant.max_draft_tokens,
            max_response_tokens=max(len(trace.response_ids) for trace in new) * 3 // 2,
            begin_at=0.5,
        )
        for entry in loaded
    ]
    # the first forward reads the emitted half of the responses, the second compiles further code
    for replay in replays:
        for _ in range(3):
            replay.forward()
    times: list[list[float]] = [[] for _ in replays]
    for _ in range(rounds):
        for replay, seconds in zip(replays, times, strict=True):
            forward = replay.forward()
            if forward.num_rows == batch:
                seconds.append(forward.propose_s)
    for entry, replay, seconds in zip(loaded, replays, times, strict=True):
        replay.close()
        median = statistics.median(seconds)
        yield {
            "what": "propose",
            "case": case,
            "method": entry.contestant.name,
            "batch": batch,
            "forwards": len(seconds),
            "us_per_request": round(1e6 * median / batch, 3),
            "ms_per_batch": round(1e3 * median, 4),
            "ms_per_batch_p99": round(1e3 * float(np.quantile(seconds, 0.99)), 4),
        }


def alone_rows(
    case: str, work: Path, old: Sequence[Trace], new: Sequence[Trace], *, rounds: int, threads: Sequence[int]
) -> Iterator[Row]:
    """Wall clock time of the product's drafting for one batch of all of `new`, by number of threads."""
    for num_threads in threads:
        method = ours(work, num_threads=num_threads)
        remember(method, old)
        replay = Replay(
            method,
            new,
            batch=len(new),
            max_draft_tokens=K,
            max_response_tokens=max(len(trace.response_ids) for trace in new) * 3 // 2,
            begin_at=0.5,
        )
        forwards = [replay.forward() for _ in range(rounds + 3)][3:]
        replay.close()
        seconds = [forward.wall_s for forward in forwards if forward.num_rows == len(new)]
        yield {
            "what": "alone",
            "case": case,
            "method": "ours",
            "threads": num_threads,
            "batch": len(new),
            "forwards": len(seconds),
            "ms_per_batch": round(1e3 * statistics.median(seconds), 4),
        }


def attach_row(folder: Path, num_bytes: int, *, repeats: int = 51) -> Row:
    """Wall clock time to attach one large segment."""
    draws = np.random.default_rng(0)
    count = num_bytes // 8 // 16384
    responses = [
        PastResponse(token_ids=draws.integers(1, 32000, 16383, dtype=np.int32), step=0, sample=i) for i in range(count)
    ]
    path = write_segment(folder, build_segment(1, 1, responses))
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        segment = attach_segment(folder, 1)
        seconds.append(time.perf_counter() - began)
        assert segment is not None
    size = path.stat().st_size
    path.unlink()
    return {"what": "attach", "case": "attach", "method": "ours", "bytes": size, "ms": 1e3 * statistics.median(seconds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledEngine:
    """An engine with one method of drafting, whose forwards take the time that SURFACE gives."""

    case: str
    method_name: str
    method: Method
    max_draft_tokens: int
    cost_model: ForwardCostModel | None = None
    """Observes the time of each forward."""

    def decode(self, traces: Sequence[Trace], batch: int) -> Row:
        """Decode while the batch is full; tokens per second, and speed over an engine without drafts."""
        replay = replay_of(self.method, traces, max_draft_tokens=self.max_draft_tokens, batch=batch)
        forwards: list[Forward] = []
        emitted, seconds, drafting_s = 0, 0.0, 0.0
        while True:
            forward = replay.forward()
            if forward.num_rows < batch:
                break
            forwards.append(forward)
            emitted += forward.num_emitted
            seconds += self._forward_s(forward)
            drafting_s += forward.propose_s if isinstance(self.method, Product) else 0.0
            if replay.finished:
                break
        replay.close()
        baseline_tokens_per_s = batch / forward_s(batch, batch)
        return {
            "what": "modelled",
            "case": self.case,
            "method": self.method_name,
            "batch": batch,
            "max_draft_tokens": self.max_draft_tokens,
            "forwards": len(forwards),
            "drafted_per_request": round(sum(f.num_drafted for f in forwards) / len(forwards) / batch, 3),
            "tokens_per_forward": round(emitted / len(forwards) / batch, 4),
            "drafting_share_of_time": round(drafting_s / (seconds + drafting_s), 5),
            "tokens_per_s": round(emitted / (seconds + drafting_s), 2),
            "over_no_drafts": round(emitted / (seconds + drafting_s) / baseline_tokens_per_s, 4),
        }

    def _forward_s(self, forward: Forward) -> float:
        """Seconds of a forward without its drafting; the cost model observes them."""
        batch, num_tokens = forward.num_rows, forward.num_rows + forward.num_drafted
        seconds = forward_s(batch, num_tokens)
        if self.cost_model is not None:
            context = CONTEXT_TOKENS * batch
            self.cost_model.observe(num_rows=batch, num_tokens=num_tokens, num_context_tokens=context, seconds=seconds)
        return seconds
