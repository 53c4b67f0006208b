"""One call of the kernel gives the drafts that its steps give one by one, with the choice made in Python."""

from pathlib import Path

import numpy as np
import pytest

from history.drafting.drafter import Drafter
from history.drafting.forward import COUNT, IS_CROWDED, RING_TRIAL, SEARCH, UPDATE, draft
from history.drafting.observed_survival import scale_to_observed_survival
from history.drafting.state import DRAFTED
from tests.history.drafting.test_drafter import Engine, FlatCosts, K, epochs, publish

THRESHOLD = 0.3


class StepByStep(Drafter):
    """Searches row by row, and joins the drafts without the kernel."""

    def _draft(self, draft_rows, token_ids, num_tokens, rooms, seconds, steps) -> int:
        state, requests = self._state, (draft_rows, token_ids, num_tokens, rooms, seconds)
        assert draft(self._tables[0], *requests, COUNT, 0, 0) == 0
        if draft(self._tables[0], *requests, UPDATE | steps & RING_TRIAL, 0, 0) == IS_CROWDED:
            self._rehash()
        for row in reversed(range(len(draft_rows))):
            draft(self._tables[0], *requests, SEARCH, row, row + 1)
        survivals = state.best_survivals[: len(draft_rows)]
        scale_to_observed_survival(state.recent_survival, state.sums, survivals, state.available)
        flat = []
        for row, draft_row in enumerate(draft_rows):
            kept = survivals[row, : state.available[row]] >= THRESHOLD
            length = len(kept) if kept.all() else int(kept.argmin())
            flat += state.best_tokens[row, :length].tolist()
            state.ends[row + 1] = len(flat)
            if draft_row >= 0:
                state.rows[draft_row, DRAFTED] = length
        state.drafted[: len(flat)] = flat
        return len(flat)


@pytest.mark.parametrize("num_rows", [1, 5])
def test_one_call_drafts_what_the_steps_draft_one_by_one(tmp_path: Path, num_rows: int) -> None:
    old, new = epochs(np.random.default_rng(num_rows), length=200, siblings=num_rows)
    publish(tmp_path, old)
    engines = [
        Engine(kind(max_draft_tokens=K, segments_dir=str(tmp_path), threshold=THRESHOLD), new, keys=[1] * num_rows)
        for kind in (Drafter, StepByStep)
    ]
    drafted = 0
    for forward in range(60):
        if forward == 30:
            for engine in engines:
                engine.draft_rows[0] = -1
        whole, steps = [engine.propose() for engine in engines]
        assert whole == steps
        drafted += sum(map(len, whole))
        for engine in engines:
            engine.emit(whole)
    assert drafted > 50
    assert engines[0].drafter.drain().num_accepted == engines[1].drafter.drain().num_accepted > 0


def test_nothing_is_learned_or_drafted_while_no_draft_can_pay(tmp_path: Path) -> None:
    old, new = epochs(np.random.default_rng(0), length=60)
    publish(tmp_path, old)
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path), cost_model=FlatCosts(2.0))
    before = drafter._state.counts.copy()
    engine = Engine(drafter, new)
    assert engine.run() <= 1
    assert (drafter._state.counts == before).all()
    stats = drafter.drain()
    assert stats.num_rows > 0 == stats.num_drafted, "the rows are counted all the same"
