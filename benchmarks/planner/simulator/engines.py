"""Simulated engines with continuous batching: computes when each response ends.

A forward with b running responses, d draft tokens for each of them and c tokens of context takes

    base + row * b * (1 + d) + context * c

seconds, and each response gains g tokens (d and g depend on b; they are 0 and 1 without drafts). Between the ends of
two responses only the context changes, by the same amount in every forward. So the time of n forwards has a closed
form, and the simulation steps from one end to the next instead of from forward to forward.

Each engine counts the tokens gained per response. A response that starts at count k with T tokens to emit ends in the
forward in which the count reaches k + T.

Invariants: an engine's clock never falls; at most `num_slots` responses run, and no response waits while a slot is
free; the ends on all engines are processed in the order of time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.harness.compiled import compiled

REACHED, GROUP_ENDED, SLOTS_FREE = 0, 1, 2
"""Why `run` returned: the time limit, the end of a group, or enough free slots on an engine (`Engines.asked`)."""

_CLOCK, _COUNTER, _CONTEXT, _RUNNING, _HEAD, _TAIL, _BUSY, _FULL = range(8)
_NUM_STATE = 8

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Time and tokens of a forward; arrays are [S + 1], by the number of running responses."""

    fixed_s: _Floats
    """Seconds without context: base + row * b * (1 + d)."""
    context_s: float
    """Seconds for each token of context."""
    gains: _Floats
    """Tokens that each response gains."""


class Engines:
    """All engines of a simulation, over responses 0..R-1, each of one of the groups 0..P-1."""

    def __init__(
        self, *, num_engines: int, num_slots: int, speed: Speed, lengths: _Floats, groups: _Ints, waiting_capacity: int
    ) -> None:
        """`lengths` [R] tokens; `groups` [R]; at most `waiting_capacity` responses wait on one engine."""
        self.num_engines, self.num_slots = num_engines, num_slots
        self._speed = speed
        self._lengths, self._groups = lengths, groups
        self._missing = np.bincount(groups).astype(np.int64)
        self.started_s: _Floats = np.full(len(lengths), np.nan)
        """[R] seconds at which each response got a slot; NaN before."""
        self.ended_s: _Floats = np.full(len(lengths), np.nan)
        """[R] seconds at which each response ended; NaN before."""
        self._had: _Floats = np.zeros(len(lengths))
        """[R] tokens that each response had when it was given to its engine."""
        self._state = np.zeros((num_engines, _NUM_STATE))
        self._ends = np.zeros((num_engines, num_slots))
        self._ids = np.zeros((num_engines, num_slots), dtype=np.int64)
        self._waiting = np.zeros((num_engines, waiting_capacity), dtype=np.int64)
        self._next_s = np.full(num_engines, np.inf)
        self.asked = np.zeros(num_engines, dtype=np.int64)
        """[E] number of free slots at which `run` reports an engine with nothing waiting; 0: never."""

    def free_slots(self, engine: int) -> int:
        """Slots without a running or waiting response."""
        state = self._state[engine]
        return int(self.num_slots - state[_RUNNING] - (state[_TAIL] - state[_HEAD]))

    def busy_s(self) -> _Floats:
        """[E] seconds in which each engine ran a response, up to its last event."""
        return self._state[:, _BUSY].copy()

    def run(self, until_s: float) -> tuple[int, int, int, float]:
        """Process ends until the caller must decide: `(why, engine, group or -1, seconds)`."""
        why, engine, group, at_s = _run(
            until_s, self._speed.fixed_s, self._speed.context_s, self._speed.gains, self._state, self._ends, self._ids,
            self._waiting, self._next_s, self._lengths, self._had, self._groups, self._missing, self.started_s,
            self.ended_s, self.asked,
        )  # fmt: skip
        return int(why), int(engine), int(group), float(at_s)

    def give(self, engine: int, responses: _Ints, *, at_s: float) -> None:
        """Queue responses on an engine; they start at once while slots are free."""
        if self._state[engine, _TAIL] - self._state[engine, _HEAD] + len(responses) > self._waiting.shape[1]:
            raise ValueError(f"engine {engine}: more than {self._waiting.shape[1]} responses would wait")
        _give(
            engine, responses, at_s, self._speed.fixed_s, self._speed.context_s, self._speed.gains, self._state,
            self._ends, self._ids, self._waiting, self._next_s, self._lengths, self._had, self.started_s,
        )  # fmt: skip

    def running(self, engine: int, *, at_s: float) -> tuple[_Ints, _Floats]:
        """Running responses and the tokens of each, at the end of the forward that runs at `at_s`."""
        self.pause(engine, at_s, 0.0)
        number = int(self._state[engine, _RUNNING])
        ids = self._ids[engine, :number]
        return ids.copy(), self._lengths[ids] - self._ends[engine, :number] + self._state[engine, _COUNTER]

    def take_away(self, engine: int, responses: _Ints, *, at_s: float) -> None:
        """Remove running responses from their engine; another engine resumes them with their tokens."""
        ids, had = self.running(engine, at_s=at_s)
        leaving = np.isin(ids, responses)
        self._had[ids[leaving]] = had[leaving]
        staying = np.flatnonzero(~leaving)
        state = self._state[engine]
        self._ends[engine, : len(staying)], self._ids[engine, : len(staying)] = (
            self._ends[engine, staying],
            ids[staying],
        )
        state[_RUNNING] = len(staying)
        state[_CONTEXT] -= had[leaving].sum()
        self.give(engine, np.zeros(0, dtype=np.int64), at_s=at_s)  # starts waiting responses

    def pause(self, engine: int, from_s: float, until_s: float) -> None:
        """Pause an engine from the end of the forward that runs at `from_s` until `until_s`."""
        _pause(
            engine, from_s, until_s, self._speed.fixed_s, self._speed.context_s, self._speed.gains, self._state,
            self._ends, self._next_s,
        )  # fmt: skip


@compiled
def _seconds(num_forwards: float, fixed: float, per_token: float, context: float, growth: float) -> float:
    return num_forwards * (fixed + per_token * context) + per_token * growth * num_forwards * (num_forwards - 1) / 2


@compiled
def _gain(state: _Floats, num_forwards: float, fixed: _Floats, per_token: float, gains: _Floats) -> None:
    """Run `num_forwards` forwards on one engine."""
    running = int(state[_RUNNING])
    growth = running * gains[running]
    seconds = _seconds(num_forwards, fixed[running], per_token, state[_CONTEXT], growth)
    state[_CLOCK] += seconds
    state[_BUSY] += seconds
    state[_COUNTER] += num_forwards * gains[running]
    state[_CONTEXT] += num_forwards * growth


@compiled
def _advance(state: _Floats, at_s: float, fixed: _Floats, per_token: float, gains: _Floats) -> None:
    """Advance one engine to the end of the forward that runs at `at_s`."""
    running = int(state[_RUNNING])
    left = at_s - state[_CLOCK]
    if left <= 0:
        return
    if running == 0:
        state[_CLOCK] = at_s
        return
    growth = running * gains[running]
    bend = per_token * growth / 2
    slope = fixed[running] + per_token * state[_CONTEXT] - bend
    exact = left / slope if bend == 0 else (np.sqrt(slope * slope + 4 * bend * left) - slope) / (2 * bend)
    _gain(state, np.ceil(exact - 1e-9), fixed, per_token, gains)


@compiled
def _look_ahead(
    engine: int, state: _Floats, ends: _Floats, fixed: _Floats, per_token: float, gains: _Floats, next_s: _Floats
) -> None:
    """Compute when the engine's next response ends."""
    running = int(state[_RUNNING])
    if running == 0:
        next_s[engine] = np.inf
        return
    num_forwards = max(np.ceil((ends[:running].min() - state[_COUNTER]) / gains[running] - 1e-9), 0.0)
    growth = running * gains[running]
    next_s[engine] = state[_CLOCK] + _seconds(num_forwards, fixed[running], per_token, state[_CONTEXT], growth)


@compiled
def _fill(
    state: _Floats, ends: _Floats, ids: _Ints, waiting: _Ints, lengths: _Floats, had: _Floats, started_s: _Floats
) -> None:
    """Start waiting responses in the free slots."""
    while state[_HEAD] < state[_TAIL] and state[_RUNNING] < len(ends):
        response = waiting[int(state[_HEAD]) % len(waiting)]
        state[_HEAD] += 1
        slot = int(state[_RUNNING])
        ids[slot], ends[slot] = response, state[_COUNTER] + lengths[response] - had[response]
        state[_CONTEXT] += had[response]
        if np.isnan(started_s[response]):
            started_s[response] = state[_CLOCK]
        state[_RUNNING] += 1


@compiled
def _give(
    engine: int, responses: _Ints, at_s: float, fixed: _Floats, per_token: float, gains: _Floats, states: _Floats,
    ends: _Floats, ids: _Ints, waiting: _Ints, next_s: _Floats, lengths: _Floats, had: _Floats, started_s: _Floats,
) -> None:  # fmt: skip
    state = states[engine]
    # responses that reach their end in this forward are ended by `_run`
    _advance(state, at_s, fixed, per_token, gains)
    for response in responses:
        waiting[engine, int(state[_TAIL]) % waiting.shape[1]] = response
        state[_TAIL] += 1
    _fill(state, ends[engine], ids[engine], waiting[engine], lengths, had, started_s)
    _look_ahead(engine, state, ends[engine], fixed, per_token, gains, next_s)


@compiled
def _pause(
    engine: int, from_s: float, until_s: float, fixed: _Floats, per_token: float, gains: _Floats, states: _Floats,
    ends: _Floats, next_s: _Floats,
) -> None:  # fmt: skip
    state = states[engine]
    _advance(state, from_s, fixed, per_token, gains)
    state[_CLOCK] = max(state[_CLOCK], until_s)
    _look_ahead(engine, state, ends[engine], fixed, per_token, gains, next_s)


@compiled
def _run(
    until_s: float, fixed: _Floats, per_token: float, gains: _Floats, states: _Floats, ends: _Floats, ids: _Ints,
    waiting: _Ints, next_s: _Floats, lengths: _Floats, had: _Floats, groups: _Ints, missing: _Ints,
    started_s: _Floats, ended_s: _Floats, asked: _Ints,
) -> tuple[int, int, int, float]:  # fmt: skip
    while True:
        engine = int(np.argmin(next_s))
        if np.isinf(next_s[engine]) or next_s[engine] > until_s:
            return REACHED, -1, -1, until_s
        state = states[engine]
        running = int(state[_RUNNING])
        slot = np.argmin(ends[engine, :running])
        num_forwards = max(np.ceil((ends[engine, slot] - state[_COUNTER]) / gains[running] - 1e-9), 0.0)
        _gain(state, num_forwards, fixed, per_token, gains)
        response = ids[engine, slot]
        ended_s[response] = state[_CLOCK]
        state[_CONTEXT] -= lengths[response] + state[_COUNTER] - ends[engine, slot]
        state[_RUNNING] -= 1
        last = running - 1
        ids[engine, slot], ends[engine, slot] = ids[engine, last], ends[engine, last]
        _fill(state, ends[engine], ids[engine], waiting[engine], lengths, had, started_s)
        _look_ahead(engine, state, ends[engine], fixed, per_token, gains, next_s)
        group = groups[response]
        missing[group] -= 1
        if missing[group] == 0:
            return GROUP_ENDED, engine, group, state[_CLOCK]
        if 0 < asked[engine] <= len(ends[engine]) - state[_RUNNING] and state[_HEAD] == state[_TAIL]:
            return SLOTS_FREE, engine, -1, state[_CLOCK]
