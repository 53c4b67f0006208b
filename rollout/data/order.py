"""The order of prompts: a fixed endless sequence over a weighted mixture, and its consumed positions.

Draw k of a data set is row k mod n of its epoch k div n. An epoch is the rows sorted by a hash of (seed, epoch, prompt
id), so dropping a row does not change the order of the others. Data sets are merged by virtual time: draw k of a set
with weight w falls at (k + 1/2) / w. The sequence is thus a pure function of prompts, weights and seed. A checkpoint
needs only the positions that were *consumed* (trained on). Prompts that were issued and not consumed when a run stopped
are issued again, in their old order.

Invariants
1. a data set's draws, in any epoch, hold each of its prompts exactly once
2. among the first N draws a set of weight w has w / (sum of weights) * N of them, to within the number of sets
3. resuming from any state continues with exactly the positions that were not consumed, in order
"""

import hashlib
import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout.types import PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """One data set of the mixture."""

    prompt_ids: tuple[PromptId, ...]
    """Rows to draw from, in file order; unique over the mixture."""
    weight: float = 1.0
    """Relative share of draws; positive."""
    contents: str = ""
    """Hash of the prompts' tokens, by which a checkpoint is refused after its file was edited; empty: not compared."""
    answers: str = ""
    """Hash of what reward functions receive with the prompts, by which an edit is noticed; empty: not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One issued prompt."""

    position: int
    """Position in the endless sequence; unique."""
    prompt_id: PromptId
    epoch: int
    """Epoch of the prompt's data set, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """The part of a checkpoint about an order."""

    fingerprint: str
    """Hash of prompts, weights, seed and shuffling: a state fits only the sequence from which it was taken."""
    cursor: int = 0
    """All positions before the cursor are consumed."""
    consumed_ahead: tuple[int, ...] = ()
    """Consumed positions after the cursor, ascending."""
    answers: tuple[str, ...] = ()
    """`PromptSet.answers` by data set; empty in states of earlier versions."""

    def to_json(self) -> dict[str, str | int | list[int] | list[str]]:
        """Plain values for a JSON file."""
        return {
            "fingerprint": self.fingerprint,
            "cursor": self.cursor,
            "consumed_ahead": list(self.consumed_ahead),
            "answers": list(self.answers),
        }

    @classmethod
    def from_json(cls, values: dict[str, object]) -> "OrderState":
        """The inverse of `to_json`; a state of an earlier version has no `answers`.

        Raises:
            ValueError: `values` is no saved state.
        """
        fingerprint, cursor, ahead = (values.get(key) for key in ("fingerprint", "cursor", "consumed_ahead"))
        if not (isinstance(fingerprint, str) and isinstance(cursor, int) and isinstance(ahead, list)):
            raise ValueError(f"prompt order: {values!r} is not a saved state (fingerprint, cursor, consumed_ahead)")
        answers = values.get("answers")
        return cls(
            fingerprint=fingerprint,
            cursor=cursor,
            consumed_ahead=tuple(int(position) for position in ahead),
            answers=tuple(map(str, answers)) if isinstance(answers, list) else (),
        )


class PromptOrder:
    """Issues draws and remembers which of them were consumed."""

    def __init__(
        self, sets: Sequence[PromptSet], *, seed: int, shuffle: bool = True, state: OrderState | None = None
    ) -> None:
        """Start at the beginning, or behind the consumed positions of `state`.

        Raises:
            ValueError: a set is empty, a weight is not positive, a prompt id occurs twice, or the state belongs to
                another sequence.
        """
        _check(sets)
        self._fingerprint = _fingerprint(sets, seed=seed, shuffle=shuffle)
        if state is not None and state.fingerprint != self._fingerprint:
            raise ValueError(
                f"prompt order: the checkpoint was made with other training prompts, weights, seed or shuffling, "
                f"or with another chat template (fingerprint {state.fingerprint}, now "
                f"{self._fingerprint}); restore them, or start a new run"
            )
        self._answers = tuple(prompts.answers for prompts in sets)
        self._earlier_answers = state.answers if state else ()
        self._cursor = state.cursor if state else 0
        self._ahead = set(state.consumed_ahead) if state else set()
        self._in_flight: defaultdict[PromptId, deque[Draw]] = defaultdict(deque)
        self._peeked: deque[Draw] = deque()
        self._draws = self._unconsumed(_sequence(sets, seed=seed, shuffle=shuffle), frozenset(self._ahead))

    @property
    def sets_with_new_answers(self) -> list[int]:
        """Numbers of the data sets whose `answers` are not those of the state from which the order started."""
        known = zip(self._earlier_answers, self._answers, strict=False)  # a state of an earlier version has none
        return [number for number, (before, now) in enumerate(known) if before and now and before != now]

    def take(self, count: int) -> list[Draw]:
        """Issue the next `count` draws."""
        draws = self.peek(count)
        for _ in draws:
            self._peeked.popleft()
        for draw in draws:
            self._in_flight[draw.prompt_id].append(draw)
        return draws

    def peek(self, count: int) -> list[Draw]:
        """The draws that `take(count)` would issue, without issuing them."""
        while len(self._peeked) < count:
            self._peeked.append(next(self._draws))
        return [self._peeked[index] for index in range(count)]

    def consume(self, prompt_ids: Iterable[PromptId]) -> None:
        """Mark prompts as consumed (trained on or dropped), each at its oldest issued position.

        Raises:
            ValueError: a prompt is not in flight.
        """
        for prompt_id in prompt_ids:
            if not self._in_flight[prompt_id]:
                raise ValueError(f"prompt order: {prompt_id!r} was consumed more often than issued")
            self._ahead.add(self._in_flight[prompt_id].popleft().position)
            if not self._in_flight[prompt_id]:
                del self._in_flight[prompt_id]
        while self._cursor in self._ahead:
            self._ahead.remove(self._cursor)
            self._cursor += 1

    def put_back(self, prompt_ids: Iterable[PromptId]) -> None:
        """Issue prompts again, before all that were never issued; each loses its newest issued position.

        Raises:
            ValueError: a prompt is not in flight.
        """
        for prompt_id in prompt_ids:
            if not self._in_flight[prompt_id]:
                raise ValueError(f"prompt order: {prompt_id!r} was put back more often than issued")
            self._peeked.append(self._in_flight[prompt_id].pop())
            if not self._in_flight[prompt_id]:
                del self._in_flight[prompt_id]
        self._peeked = deque(sorted(self._peeked, key=lambda draw: draw.position))

    def state(self) -> OrderState:
        """The positions consumed so far, for a checkpoint."""
        return OrderState(
            fingerprint=self._fingerprint,
            cursor=self._cursor,
            consumed_ahead=tuple(sorted(self._ahead)),
            answers=self._answers,
        )

    def _unconsumed(self, sequence: Iterator[Draw], consumed_ahead: frozenset[int]) -> Iterator[Draw]:
        cursor = self._cursor
        return (draw for draw in sequence if draw.position >= cursor and draw.position not in consumed_ahead)


def _sequence(sets: Sequence[PromptSet], *, seed: int, shuffle: bool) -> Iterator[Draw]:
    """The endless sequence of draws, from position 0."""
    draws = [_draws_of(prompts, seed=seed, shuffle=shuffle) for prompts in sets]
    counts = [0] * len(sets)
    due = [(0.5 / prompts.weight, index) for index, prompts in enumerate(sets)]
    heapq.heapify(due)
    position = 0
    while True:
        _, index = due[0]
        prompt_id, epoch = next(draws[index])
        yield Draw(position=position, prompt_id=prompt_id, epoch=epoch)
        position += 1
        counts[index] += 1
        heapq.heapreplace(due, ((counts[index] + 0.5) / sets[index].weight, index))


def _draws_of(prompts: PromptSet, *, seed: int, shuffle: bool) -> Iterator[tuple[PromptId, int]]:
    epoch = 0
    while True:
        order = prompts.prompt_ids
        if shuffle:
            order = tuple(sorted(order, key=lambda prompt_id: _hash(str(seed), str(epoch), prompt_id)))
        yield from ((prompt_id, epoch) for prompt_id in order)
        epoch += 1


def _fingerprint(sets: Sequence[PromptSet], *, seed: int, shuffle: bool) -> str:
    parts = [str(seed), str(shuffle)]
    for prompts in sets:
        parts += [repr(prompts.weight), prompts.contents, str(len(prompts.prompt_ids)), *prompts.prompt_ids]
    return _hash(*parts).hex()


def _hash(*parts: str) -> bytes:
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()


def _check(sets: Sequence[PromptSet]) -> None:
    if not sets:
        raise ValueError("prompt order: data.train holds no data set; needs at least 1")
    seen: set[PromptId] = set()
    for index, prompts in enumerate(sets):
        if not prompts.prompt_ids:
            raise ValueError(f"prompt order: data.train[{index}] holds no prompt; needs at least 1")
        if not prompts.weight > 0:
            raise ValueError(f"prompt order: data.train[{index}].weight {prompts.weight} must be positive")
        for prompt_id in prompts.prompt_ids:
            if prompt_id in seen:
                raise ValueError(f"prompt order: {prompt_id!r} occurs twice; give every data set its own name")
            seen.add(prompt_id)
