"""Stores the last visits of a shard's prompts under a byte budget.

A visit holds the responses of one prompt in one step. Responses arrive in any order and more than once; a response
replaces the earlier one of the same step and sample. A visit is *complete* when all its rewards and responses have
arrived. Only a complete visit replaces older ones, because half a visit drafts worse than the visit before.

The rewards of an evaluation's visit are all NaN. It replaces older ones like any other, but does not count as a return.

Above the budget the store evicts the prompts of least value. A prompt's value per byte is the expected saving of its
next visit over the expected wait. The saving is proportional to tokens times the share that the next visit repeats, and
tokens cancel against bytes. The share is measured at the prompt's last return; before, the mean of all prompts is used.
`measure_returns` measures it without the lock: comparing two visits takes longer than storing hundreds of them.

Mutating: `note_epochs`, `append`, `note_rewards`, `restore`, `measure_returns`, `drain_returns`. All methods may be
called from any thread.

Invariants, asserted by `check_integrity`: the byte count is the sum over all visits and at most the budget; a prompt
has at most `kept_steps` + 1 visits with ascending steps; arrays are read-only copies.

`expected_wait` estimates the steps until a prompt returns from the steps since its last visit. Each epoch is shuffled
anew, so the interval between two visits is the sum of two uniform numbers: triangular on [0, 2E] for epochs of E steps.
Prompts seen long ago therefore return *soon*. Beyond two epochs they never return. A least-recently-used cache assumes
the opposite and would evict exactly the prompts that return next. The length of an epoch is that of the prompt's data
set (`note_epochs`). Intervals between visits do not tell it: a prompt that is put back returns in the next step.
"""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from history.types import PastResponse


def expected_wait(ages: npt.NDArray[np.float64], epochs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean steps until prompts return that were last seen `ages` steps ago, [P]; inf beyond two epochs.

    This is the mean residual of the triangular distribution on [0, 2 * epoch]. `epochs` are positive, in steps, [P].
    """
    x = np.clip(ages / epochs, 0.0, 2.0)
    early = ((1 - x) - (1 - x**3) / 6 + 1 / 6) / np.maximum(1 - x**2 / 2, 0.5)
    late = (2 - x) / 3
    waits: npt.NDArray[np.float64] = np.where(x < 1, early, late) * epochs
    return np.where(ages > 2 * epochs, np.inf, waits)


RESPONSE_BYTES = 256
"""Memory of a response beside its tokens: objects and dictionary entries."""

_LOW_WATER = 0.95
"""Eviction stops at this share of the budget, so that it does not run at every append."""

_PRIOR_REUSE = 0.7
_MEASURED_RETURNS = 64
"""Most returns with measured reuse between two calls of `drain_returns`; later returns record lengths only."""

_NOTED_RETURNS = 1 << 16

ReuseShare = Callable[[Sequence[PastResponse], Sequence[PastResponse]], float]
"""Share of the second visit's tokens that repeat the first visit, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """A training prompt's return: its new visit is complete."""

    mean_length_before: float
    mean_length: float
    """Mean tokens of a response of the visit."""
    num_tokens: int
    """Tokens of the new visit."""
    reusable_share: float
    """NaN if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters of a store; stats of several stores can be added."""

    num_bytes: int = 0
    num_prompts: int = 0
    num_responses: int = 0
    num_evictions: int = 0
    """Prompts evicted since the store began."""

    def __add__(self, other: "StoreStats") -> "StoreStats":
        return StoreStats(
            num_bytes=self.num_bytes + other.num_bytes,
            num_prompts=self.num_prompts + other.num_prompts,
            num_responses=self.num_responses + other.num_responses,
            num_evictions=self.num_evictions + other.num_evictions,
        )


@dataclass(slots=True, kw_only=True)
class _Visit:
    step: int
    responses: dict[int, PastResponse] = field(default_factory=dict)
    """By sample."""
    rewards: tuple[float, ...] = ()
    """Empty until the rewards arrive."""
    is_finished: bool = False
    """The visit is complete and has replaced older ones."""

    @property
    def is_rewarded(self) -> bool:
        """Whether a response has a reward; none has in an evaluation."""
        return not all(map(math.isnan, self.rewards))

    @property
    def is_complete(self) -> bool:
        return bool(self.rewards) and len(self.responses) >= len(self.rewards)

    @property
    def num_tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses.values())

    @property
    def num_bytes(self) -> int:
        return 4 * self.num_tokens + RESPONSE_BYTES * len(self.responses)

    def ordered(self) -> list[PastResponse]:
        return [self.responses[sample] for sample in sorted(self.responses)]


@dataclass(slots=True, kw_only=True)
class _Past:
    """The stored visits of one prompt."""

    visits: list[_Visit] = field(default_factory=list)
    stamp: int = 0
    """Increases whenever the prompt's responses change."""
    num_bytes: int = 0
    reuse: float = math.nan

    def responses(self) -> list[PastResponse]:
        return [response for visit in self.visits for response in visit.ordered()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unmeasured:
    """A return whose reuse is not measured yet."""

    past: _Past
    before: Sequence[PastResponse]
    now: Sequence[PastResponse]
    lengths: Return
    """Without the share."""


class PromptStore:
    """The last visits of a shard's prompts under a byte budget; see the module docstring."""

    def __init__(self, *, budget_bytes: int, kept_steps: int, reuse_share: ReuseShare) -> None:
        self._budget_bytes = budget_bytes
        self._kept_steps = kept_steps
        self._reuse_share = reuse_share
        self._lock = threading.RLock()
        self._prompts: dict[int, _Past] = {}
        self._num_bytes = self._num_evictions = 0
        self._stamps = itertools.count(time.time_ns())  # differs from the stamps of an earlier process
        self._first_step: int | None = None
        self._last_step = -1
        self._epochs: dict[int, int] = {}
        self._longest_epoch = self._num_measured = 0
        self._returns: deque[Return] = deque(maxlen=_NOTED_RETURNS)
        self._unmeasured: deque[_Unmeasured] = deque()

    def note_epochs(self, epochs: Mapping[int, int]) -> None:
        """Learn the steps of an epoch of each prompt's data set, by prompt key; they are positive.

        For other prompts, as those of evaluations, the longest of them is assumed.
        """
        with self._lock:
            self._epochs = dict(epochs)
            self._longest_epoch = max(self._epochs.values(), default=0)

    def append(self, prompt_key: int, responses: Iterable[PastResponse]) -> None:
        """Store finished responses, except empty ones; copies their tokens."""
        with self._lock:
            past = self._prompts.setdefault(prompt_key, _Past())
            for response in responses:
                if len(response.token_ids):
                    self._insert(past, response)
            self._changed(prompt_key, past)
            self._evict()

    def note_rewards(self, prompt_key: int, step: int, rewards: Sequence[float]) -> None:
        """Store rewards of a visit, in the order of its samples; NaN where there is none, or where it was noted before.

        Groups of a prompt that is drawn twice in a step share a visit, and may be scored at different times. Rewards
        of an unknown visit are ignored.
        """
        with self._lock:
            past = self._prompts.get(prompt_key)
            visit = next((v for v in past.visits if v.step == step), None) if past is not None else None
            if past is None or visit is None:
                return
            visit.rewards = tuple(
                before if math.isnan(reward) else reward
                for before, reward in itertools.zip_longest(visit.rewards, rewards, fillvalue=math.nan)
            )
            for sample, response in visit.responses.items():
                if sample < len(visit.rewards):
                    visit.responses[sample] = replace(response, reward=visit.rewards[sample])
            self._finish_visit(past, visit)
            self._changed(prompt_key, past)

    def restore(self, prompt_key: int, responses: Iterable[PastResponse]) -> None:
        """Replace a prompt's visits by `responses`, as complete visits. No responses: remove the prompt."""
        with self._lock:
            past = _Past()
            for response in responses:
                self._insert(past, response)
            for visit in past.visits:
                visit.rewards = tuple(response.reward for response in visit.ordered())
                visit.is_finished = True
            self._forget(prompt_key)
            if past.visits:
                self._prompts[prompt_key] = past
                self._changed(prompt_key, past)
                self._evict()

    def fetch(
        self, prompt_keys: Iterable[int], known: Mapping[int, int] | None = None
    ) -> dict[int, tuple[int, list[PastResponse]]]:
        """Return stamp and responses of each stored prompt; no responses if the stamp equals the `known` one."""
        known_stamps = known or {}
        with self._lock:
            prompts = {key: past for key in prompt_keys if (past := self._prompts.get(key)) is not None}
            return {
                key: (past.stamp, [] if known_stamps.get(key) == past.stamp else past.responses())
                for key, past in prompts.items()
            }

    def stamps(self) -> dict[int, int]:
        """Return the stamp of every stored prompt. A stamp increases whenever the prompt's responses change."""
        with self._lock:
            return {key: past.stamp for key, past in self._prompts.items()}

    @property
    def last_step(self) -> int:
        """Newest step of all responses ever appended; -1 before the first."""
        return self._last_step

    def stats(self) -> StoreStats:
        """Return the current counters."""
        with self._lock:
            return StoreStats(
                num_bytes=self._num_bytes,
                num_prompts=len(self._prompts),
                num_responses=sum(len(v.responses) for past in self._prompts.values() for v in past.visits),
                num_evictions=self._num_evictions,
            )

    def measure_returns(self) -> None:
        """Measure the reuse of the prompts that have returned; `drain_returns` leaves them out until then."""
        while True:
            with self._lock:
                if not self._unmeasured:
                    return
                returned = self._unmeasured.popleft()
            share = self._reuse_share(returned.before, returned.now)
            with self._lock:
                returned.past.reuse = share
                self._returns.append(replace(returned.lengths, reusable_share=share))

    def drain_returns(self) -> list[Return]:
        """Return the returns completed since the last call, at most the newest 65,536."""
        with self._lock:
            returns = list(self._returns)
            self._returns.clear()
            self._num_measured = 0
            return returns

    def check_integrity(self) -> None:
        """Assert the invariants over the whole store."""
        with self._lock:
            assert self._num_bytes == sum(past.num_bytes for past in self._prompts.values()), "bytes are miscounted"
            assert self._num_bytes <= self._budget_bytes, "the budget is exceeded"
            for key, past in self._prompts.items():
                steps = [visit.step for visit in past.visits]
                assert steps == sorted(set(steps)), f"steps of prompt {key:016x} do not ascend"
                assert 0 < len(steps) <= self._kept_steps + 1, f"prompt {key:016x} has {len(steps)} visits"
                assert past.num_bytes == sum(visit.num_bytes for visit in past.visits)
                assert not any(response.token_ids.flags.writeable for response in past.responses())

    def _insert(self, past: _Past, response: PastResponse) -> None:
        visit = next((v for v in past.visits if v.step == response.step), None)
        if visit is None:
            visit = self._begin_visit(past, response.step)
        reward = visit.rewards[response.sample] if response.sample < len(visit.rewards) else response.reward
        token_ids = np.array(response.token_ids, dtype=np.int32)
        token_ids.flags.writeable = False
        visit.responses[response.sample] = replace(response, token_ids=token_ids, reward=reward)
        self._finish_visit(past, visit)

    def _begin_visit(self, past: _Past, step: int) -> _Visit:
        visit = _Visit(step=step)
        past.visits = sorted([*past.visits, visit], key=lambda v: v.step)[-self._kept_steps - 1 :]
        self._first_step = step if self._first_step is None else min(self._first_step, step)
        self._last_step = max(self._last_step, step)
        return visit

    def _finish_visit(self, past: _Past, visit: _Visit) -> None:
        """If `visit` is the newest visit and has become complete, drop the visits it replaces, and record a return."""
        if visit.is_finished or not visit.is_complete or visit is not past.visits[-1]:
            return
        visit.is_finished = True
        if len(past.visits) > 1 and visit.is_rewarded:
            self._note_return(past, past.visits[-2], visit)
        past.visits = past.visits[-self._kept_steps :]

    def _note_return(self, past: _Past, before: _Visit, now: _Visit) -> None:
        lengths = Return(
            mean_length_before=before.num_tokens / len(before.responses),
            mean_length=now.num_tokens / len(now.responses),
            num_tokens=now.num_tokens,
            reusable_share=math.nan,
        )
        if self._num_measured >= _MEASURED_RETURNS:
            self._returns.append(lengths)
            return
        self._num_measured += 1
        self._unmeasured.append(_Unmeasured(past=past, before=before.ordered(), now=now.ordered(), lengths=lengths))

    def _changed(self, prompt_key: int, past: _Past) -> None:
        past.stamp = next(self._stamps)
        num_bytes = sum(visit.num_bytes for visit in past.visits)
        self._num_bytes += num_bytes - past.num_bytes
        past.num_bytes = num_bytes
        if not past.visits:
            self._forget(prompt_key)

    def _forget(self, prompt_key: int) -> None:
        past = self._prompts.pop(prompt_key, None)
        if past is not None:
            self._num_bytes -= past.num_bytes

    def _evict(self) -> None:
        if self._num_bytes <= self._budget_bytes:
            return
        keys = list(self._prompts)
        for index in np.argsort(self._values(keys), kind="stable").tolist():
            if self._num_bytes <= _LOW_WATER * self._budget_bytes:
                return
            self._forget(keys[index])
            self._num_evictions += 1

    def _values(self, prompt_keys: Sequence[int]) -> npt.NDArray[np.float64]:
        """Expected saving per byte and per step of waiting, [P], in arbitrary units."""
        pasts = [self._prompts[key] for key in prompt_keys]
        reuse = np.array([past.reuse for past in pasts], dtype=np.float64)
        measured = reuse[~np.isnan(reuse)]
        reuse[np.isnan(reuse)] = measured.mean() if len(measured) else _PRIOR_REUSE
        epochs = self._epoch_steps(prompt_keys)
        # another run's visits, with steps below 0, are at most an epoch old: all prompts come in this run's first one
        steps = np.maximum([past.visits[-1].step for past in pasts], -epochs)
        values: npt.NDArray[np.float64] = reuse / np.maximum(expected_wait(self._last_step - steps, epochs), 1.0)
        return values

    def _epoch_steps(self, prompt_keys: Sequence[int]) -> npt.NDArray[np.float64]:
        """Steps of an epoch of each prompt, [P]: as noted, or else the longest. If none is known, the whole time."""
        span = max(self._last_step - (self._first_step or 0), 1)
        return np.array([self._epochs.get(key, self._longest_epoch or span) for key in prompt_keys], dtype=np.float64)
