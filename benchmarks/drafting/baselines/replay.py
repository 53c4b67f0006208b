"""Decodes recorded responses again, forward by forward, with the drafts of a method.

A forward verifies each row's draft. It emits the leading draft tokens that agree with the recorded response, and one
more token. So a method without drafts emits one token per row and forward. As in an engine, the prompt's forward emits
the first token, which is not counted, and the next request gets the row of a finished one.

Invariants: a method sees a response's tokens only after they are emitted; its drafts never change the tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from history.drafting.stats import CALIBRATION_BINS
from history.store.traces import Trace
from history.types import TokenIds

Longs = npt.NDArray[np.int64]
Drafts = Sequence[Sequence[int]]


class Method(Protocol):
    """A drafting method. It numbers the running requests by draft rows."""

    survivals: Sequence[Sequence[float]]
    """Predicted probability that each token of the latest drafts survives; empty if the method predicts none."""

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None:
        """Add all responses of a prompt's finished visit to the history."""

    def open(self, trace: Trace, max_length: int) -> int:
        """Begin a request and return its draft row; the response must not be read. `max_length` includes the prompt."""

    def close(self, draft_row: int) -> None:
        """End a request."""

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> Drafts:
        """Drafts of a batch, arguments as of `history.drafting.drafter.Drafter.propose`."""

    def num_bytes(self) -> int:
        """Bytes of the history of finished visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Counts and times of one forward."""

    num_rows: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    num_context_tokens: int
    propose_s: float
    """CPU time of this thread inside the method."""
    wall_s: float
    """Time until the method returned."""


class Replay:
    """Requests on a batch of rows. `forward` mutates."""

    def __init__(
        self,
        method: Method,
        traces: Sequence[Trace],
        *,
        batch: int,
        max_draft_tokens: int,
        max_response_tokens: int,
        begin_at: float = 0.0,
    ) -> None:
        """Rows start with a share `begin_at` of their response already emitted."""
        self._method = method
        self._waiting = [trace for trace in reversed(traces) if len(trace.response_ids) > 1]
        self._max_draft_tokens = max_draft_tokens
        self._max_response_tokens = max_response_tokens
        self._begin_at = begin_at
        longest_prompt = max(len(trace.prompt_ids) for trace in traces)
        self._draft_rows: Longs = np.full(batch, -1, dtype=np.int64)
        self._token_ids = np.zeros((batch, longest_prompt + max_response_tokens), dtype=np.int32)
        self._num_tokens = np.zeros(batch, dtype=np.int32)
        self._ends = np.zeros(batch, dtype=np.int32)
        self._limits = np.zeros(batch, dtype=np.int32)
        self._rows: list[Trace | None] = [None] * batch
        self._answers: list[list[int]] = [[]] * batch
        self.calibration = np.zeros((CALIBRATION_BINS, 3))
        """[bins, 3] by predicted survival: drafted tokens, sum of the predictions, surviving tokens."""
        for row in range(batch):
            self._take_next(row)

    @property
    def finished(self) -> bool:
        """Whether every response has been emitted."""
        return not (self._draft_rows >= 0).any()

    def forward(self) -> Forward:
        """Draft, verify, emit."""
        rows = np.flatnonzero(self._draft_rows >= 0)
        draft_rows, num_tokens = self._draft_rows[rows], self._num_tokens[rows]
        token_ids = self._token_ids if len(rows) == len(self._draft_rows) else self._token_ids[rows]
        rooms = np.minimum(self._limits[rows] - num_tokens - 1, self._max_draft_tokens).astype(np.int32)
        began_at, began = time.perf_counter(), time.thread_time()
        drafts = self._method.propose(draft_rows, token_ids, num_tokens, rooms)
        seconds, wall_s = time.thread_time() - began, time.perf_counter() - began_at
        accepted = [self._accepted(row, draft) for row, draft in zip(rows.tolist(), drafts, strict=True)]
        self._calibrate(accepted)
        emitted = sum(self._emit(row, count + 1) for row, count in zip(rows.tolist(), accepted, strict=True))
        return Forward(
            num_rows=len(rows),
            num_drafted=sum(len(draft) for draft in drafts),
            num_accepted=sum(accepted),
            num_emitted=emitted,
            num_context_tokens=int(num_tokens.sum()),
            propose_s=seconds,
            wall_s=wall_s,
        )

    def close(self) -> None:
        """End all running and waiting requests."""
        self._waiting.clear()
        for row in np.flatnonzero(self._draft_rows >= 0).tolist():
            self._method.close(int(self._draft_rows[row]))
            self._draft_rows[row] = -1

    def _accepted(self, row: int, draft: Sequence[int]) -> int:
        begin = int(self._num_tokens[row])
        answer = self._answers[row][begin : begin + len(draft)]
        if answer == draft:
            return len(answer)
        return next((i for i, (a, b) in enumerate(zip(answer, draft, strict=False)) if a != b), len(answer))

    def _calibrate(self, accepted: Sequence[int]) -> None:
        for count, survivals in zip(accepted, self._method.survivals, strict=False):
            for i, survival in enumerate(survivals):
                self.calibration[min(int(survival * CALIBRATION_BINS), CALIBRATION_BINS - 1)] += (
                    1,
                    survival,
                    i < count,
                )

    def _emit(self, row: int, count: int) -> int:
        begin, end = int(self._num_tokens[row]), int(self._ends[row])
        stop = min(begin + count, end)
        self._token_ids[row, begin:stop] = self._answers[row][begin:stop]
        self._num_tokens[row] = stop
        if stop == end:
            self._method.close(int(self._draft_rows[row]))
            self._take_next(row)
        return stop - begin

    def _take_next(self, row: int) -> None:
        self._draft_rows[row] = -1
        if not self._waiting:
            return
        trace = self._waiting.pop()
        answer = np.concatenate([trace.prompt_ids, trace.response_ids])
        first = len(trace.prompt_ids) + max(1, int(self._begin_at * len(trace.response_ids)))
        self._limits[row] = len(trace.prompt_ids) + self._max_response_tokens
        self._draft_rows[row] = self._method.open(trace, int(self._limits[row]))
        self._answers[row] = answer.tolist()
        self._token_ids[row, :first] = answer[:first]
        self._num_tokens[row] = first
        self._ends[row] = len(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Sums over the forwards of a replay."""

    num_row_forwards: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    calibration_error: float | None
    """None for a method without predictions."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a row emits per forward; 1 without drafts."""
        return self.num_emitted / max(self.num_row_forwards, 1)


def decode(replay: Replay) -> Outcome:
    """Run a replay to its end."""
    forwards: list[Forward] = []
    while not replay.finished:
        forwards.append(replay.forward())
    count, predicted, survived = replay.calibration.T
    return Outcome(
        num_row_forwards=sum(forward.num_rows for forward in forwards),
        num_drafted=sum(forward.num_drafted for forward in forwards),
        num_accepted=sum(forward.num_accepted for forward in forwards),
        num_emitted=sum(forward.num_emitted for forward in forwards),
        calibration_error=float(np.abs(predicted - survived).sum() / count.sum()) if count.any() else None,
    )
