from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafting.baselines.replay import Longs, Outcome, Replay, decode
from history.store.traces import Trace
from history.types import TokenIds
from tests.support.traces import trace


class Counting:
    """Drafts the numbers after the newest token; records the tokens shown to it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.survivals: list[list[float]] = []
        self.opened: list[Trace] = []
        self.closed: list[int] = []
        self.shown: list[list[int]] = []

    def remember(self, prompt_id: str, visit: Sequence[Trace]) -> None: ...

    def open(self, trace: Trace, max_length: int) -> int:
        self.opened.append(trace)
        return 10 * len(self.opened)

    def close(self, draft_row: int) -> None:
        self.closed.append(draft_row)

    def propose(self, draft_rows: Longs, token_ids: TokenIds, num_tokens: TokenIds, rooms: TokenIds) -> list[list[int]]:
        self.shown += [token_ids[row, :].tolist() for row in range(len(draft_rows))]
        newest = token_ids[np.arange(len(draft_rows)), num_tokens - 1]
        drafts = [
            list(range(token + 1, token + 1 + min(self.length, room)))
            for token, room in zip(newest.tolist(), rooms.tolist(), strict=True)
        ]
        self.survivals = [[0.5] * len(draft) for draft in drafts]
        return drafts

    def num_bytes(self) -> int:
        return 0


def naive(responses: Sequence[Sequence[int]], length: int, limit: int) -> tuple[int, int, int]:
    """(forwards, accepted, emitted) of decoding one response at a time."""
    forwards = accepted = emitted = 0
    for response in responses:
        position = 1
        while position < len(response):
            room = min(length, limit - position - 1)
            run = 0
            while (
                run < room
                and position + run < len(response)
                and response[position + run] == response[position - 1] + 1 + run
            ):
                run += 1
            step = min(run + 1, len(response) - position)
            forwards, accepted, emitted, position = forwards + 1, accepted + run, emitted + step, position + step
    return forwards, accepted, emitted


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_replay_equals_decoding_one_response_after_another(
    steps: list[list[int]], length: int, batch: int, max_draft_tokens: int
) -> None:
    responses = [np.cumsum(step).tolist() for step in steps]
    method = Counting(length)
    traces = [trace(response) for response in responses]
    replay = Replay(method, traces, batch=batch, max_draft_tokens=max_draft_tokens, max_response_tokens=24)
    found = decode(replay)
    forwards, accepted, emitted = naive(responses, min(length, max_draft_tokens), 24)
    assert (found.num_row_forwards, found.num_accepted, found.num_emitted) == (forwards, accepted, emitted)
    assert len(method.opened) == len(method.closed) == sum(len(response) > 1 for response in responses)


def test_a_method_never_sees_tokens_that_are_not_emitted() -> None:
    method = Counting(2)
    decode(Replay(method, [trace([5, 6, 9, 10, 40])], batch=1, max_draft_tokens=4, max_response_tokens=8))
    # prompt 900, 901; the prompt's forward emits 5, the first forward accepts 6 and adds 9, the second accepts 10
    assert [[token for token in shown if token] for shown in method.shown] == [[900, 901, 5], [900, 901, 5, 6, 9]]


def test_drafts_leave_room_for_the_sampled_token_of_every_forward() -> None:
    method = Counting(4)
    replay = Replay(method, [trace([1, 2, 3, 4])], batch=1, max_draft_tokens=4, max_response_tokens=4)
    forward = replay.forward()
    assert (forward.num_drafted, forward.num_accepted, forward.num_emitted) == (2, 2, 3)
    assert replay.finished


def test_finished_rows_are_reused_by_the_next_request() -> None:
    method = Counting(0)
    replay = Replay(
        method, [trace([1, 1]), trace([2, 2, 2]), trace([3, 3])], batch=2, max_draft_tokens=4, max_response_tokens=4
    )
    assert [replay.forward().num_rows for _ in range(2)] == [2, 2]
    assert replay.finished
    assert [opened.response_ids[0] for opened in method.opened] == [1, 2, 3]
    assert method.closed == [10, 30, 20]


def test_a_row_may_begin_in_the_middle_of_a_response() -> None:
    method = Counting(0)
    replay = Replay(method, [trace([1, 2, 3, 4])], batch=1, max_draft_tokens=4, max_response_tokens=4, begin_at=0.5)
    assert decode(replay).num_emitted == 2
    assert method.shown[0][:4] == [900, 901, 1, 2]


def test_calibration_error_is_the_distance_between_predicted_and_observed_survival() -> None:
    method = Counting(4)
    # of four drafted tokens, predicted to survive with 0.5 each, three do
    replay = Replay(method, [trace([1, 2, 3, 4, 9])], batch=1, max_draft_tokens=4, max_response_tokens=8)
    assert decode(replay).calibration_error == pytest.approx(0.25)


def test_tokens_per_forward_is_1_without_drafts() -> None:
    traces = [trace([1, 2, 3, 4, 9])]
    found = decode(Replay(Counting(0), traces, batch=1, max_draft_tokens=4, max_response_tokens=8))
    assert found == Outcome(num_row_forwards=4, num_drafted=0, num_accepted=0, num_emitted=4, calibration_error=None)
    assert found.tokens_per_forward == 1.0
