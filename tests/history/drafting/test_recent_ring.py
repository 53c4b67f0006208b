"""The ring of other prompts' texts: its content, and drafts from it if prompts are alike."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from history.drafting.drafter import Drafter
from history.drafting.live_text import BUCKET, BY_THREE, newest_places
from history.drafting.recent_ring import MAX_FINISHED_TOKENS, NUM_PLACES, REGION, append_finished, append_running
from history.drafting.ring_use import ENOUGH_ACCEPTED, FEW_TRIALS, PAYS, TRIALS, decide_ring_use
from history.index.suffix_array import SEPARATOR
from tests.history.drafting.test_drafter import PROMPT, Engine, K, publish

NUM_BUCKETS = 1 << 12


def ring_of(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ring = np.full(size, SEPARATOR, dtype=np.int32)
    return ring, np.full((NUM_BUCKETS, BUCKET), -1, dtype=np.int32), np.zeros(1, dtype=np.int64)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=30))
def test_the_ring_holds_the_newest_texts_completely_and_separately(texts: list[list[int]]) -> None:
    ring, buckets, end = ring_of(100)
    for text in texts:
        append_finished(ring, buckets, end, np.array(text, dtype=np.int32), 0, len(text))
    assert ring[0] == ring[-1] == SEPARATOR
    kept = [text for text in texts if len(text) > 1]
    at = int(end[0])
    if kept:
        newest = kept[-1]
        assert ring[at - len(newest) : at].tolist() == newest
        assert ring[at - len(newest) - 1] == ring[at] == SEPARATOR
        context = np.array(newest[:-1], dtype=np.int32)
        last = len(context) - 1
        places = np.zeros(BUCKET, dtype=np.int32)
        count, _ = newest_places(ring, buckets, context, last, len(context), BY_THREE, places)
        # an overwritten position may match if its new text is the same; it never gives another text
        assert all(ring[place - 1] == context[-1] for place in places[:count])
        assert at - 1 in places[:count].tolist() or count == BUCKET or len(set(newest)) < len(newest)


def test_the_ring_keeps_the_newest_tokens_of_a_long_text() -> None:
    ring, buckets, end = ring_of(3 * MAX_FINISHED_TOKENS)
    text = np.arange(2 * MAX_FINISHED_TOKENS, dtype=np.int32)
    append_finished(ring, buckets, end, text, 0, len(text))
    assert np.array_equal(ring[1 : 1 + MAX_FINISHED_TOKENS], text[MAX_FINISHED_TOKENS:])
    assert end[0] == 1 + MAX_FINISHED_TOKENS


def test_a_prompt_without_history_is_drafted_from_other_prompts_responses(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    phrases = [generator.integers(0, 600, size=30).tolist() for _ in range(4)]

    def response() -> list[int]:
        return [
            token for index in generator.permutation(4) for token in (*phrases[index], int(generator.integers(600)))
        ]

    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    speeds = [Engine(drafter, [response()], keys=[key]).run() for key in range(1, 20)]
    assert speeds[0] < 1.5
    assert np.mean(speeds[5:]) > 3
    stats = drafter.drain()
    assert stats.accepted_by_source[2] > 0.5 * stats.num_accepted


def test_the_ring_is_searched_seldom_if_prompts_have_nothing_in_common(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    for key in range(1, 4):
        Engine(drafter, [generator.integers(0, 600, size=100).tolist()], keys=[key]).run()
    looked = []
    engine = Engine(drafter, [generator.integers(0, 600, size=200).tolist()], keys=[9])
    engine.run(lambda drafts: looked.append(int(drafter._state.uses_ring[0])))
    assert 0 < sum(looked) < 0.2 * len(looked)


def test_the_ring_is_searched_seldom_if_the_prompts_history_is_as_good(tmp_path: Path) -> None:
    """All prompts have the same responses, so the ring adds nothing to the history of the prompt."""
    said = np.random.default_rng(0).integers(0, 600, size=60).tolist()

    def looks(*, history: bool) -> list[int]:
        folder = tmp_path / str(history)
        folder.mkdir()
        drafter, found = Drafter(max_draft_tokens=2, segments_dir=str(folder)), []
        for key in range(1, 41):
            if history:
                publish(folder, [said], key=key)
            Engine(drafter, [said], keys=[key]).run(lambda drafts: found.append(int(drafter._state.uses_ring[0])))
        assert drafter.drain().num_accepted > 1000, "both are drafted"
        return found[-200:]

    assert np.mean(looks(history=False)) == 1
    assert np.mean(looks(history=True)) < 0.1


def test_a_short_bad_stretch_does_not_end_searches_that_paid_for_long() -> None:
    uses_ring, trials = np.ones(1, dtype=np.int64), np.array([1.0, 0.0, 0.0, 0.0])

    def judge(gained: float) -> bool:
        for _ in range(FEW_TRIALS):
            of_one = ENOUGH_ACCEPTED / FEW_TRIALS
            decide_ring_use(uses_ring, trials, gained * of_one, of_one, False)
        return bool(trials[PAYS])

    assert judge(0.2) and judge(0.2)
    assert judge(0.0)
    assert not (judge(0.0) and judge(0.0))


def test_a_large_batch_decides_sooner_whether_the_ring_pays(tmp_path: Path) -> None:
    said = np.random.default_rng(0).integers(0, 600, size=400).tolist()
    publish(tmp_path, [said], key=1)
    num_rows, looked = 40, []
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    engine = Engine(drafter, [said] * num_rows, keys=[1] * num_rows)
    engine.run(lambda drafts: looked.append(int(drafter._state.uses_ring[0])))
    enough = max(-(-ENOUGH_ACCEPTED // (num_rows * K)), FEW_TRIALS)
    assert enough <= sum(looked[:TRIALS]) <= enough + 3 < TRIALS, "the first forwards accept less"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90)), min_size=1, max_size=30))
def test_the_ring_holds_running_responses_as_emitted(steps: list[tuple[int, int]]) -> None:
    """Four responses grow in any order; their tokens encode response and position."""
    size = 4000
    ring = np.full(size, SEPARATOR, dtype=np.int32)
    buckets, end = np.full((NUM_BUCKETS, NUM_PLACES), -1, dtype=np.int32), np.zeros(1, dtype=np.int64)
    texts = [np.arange(row * 10_000, row * 10_000 + 3000, dtype=np.int32) for row in range(4)]
    grown, regions = [0] * 4, [(0, 0)] * 4
    for row, count in steps:
        stop = grown[row] + count
        regions[row] = append_running(ring, buckets, end, texts[row], 0, grown[row], stop, *regions[row])
        grown[row] = stop
    assert ring[0] == ring[-1] == SEPARATOR
    if end[0] + REGION < size - 2 and sum(grown) < size // 4:  # nothing was overwritten
        assert set(ring[ring >= 0].tolist()) == {
            token for row in range(4) for token in texts[row][: grown[row]].tolist()
        }
    follows = (ring[:-1] >= 0) & (ring[1:] >= 0)
    assert (ring[1:][follows] == ring[:-1][follows] + 1).all()


def test_a_running_response_of_another_prompt_is_drafted_from(tmp_path: Path) -> None:
    """Two prompts have the same response, one twenty tokens later."""
    said = np.random.default_rng(0).integers(0, 600, size=200).tolist()
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    engine = Engine(drafter, [said, said], keys=[1, 2])
    for _ in range(20):  # the second one has only begun
        length = engine.emitted[:1] + len(PROMPT)
        drafter.propose(engine.draft_rows[:1], engine.texts, length, np.zeros(1, dtype=np.int32))
        engine.emit([[]])
    num_forwards = 0
    while engine.emitted[1] < 60:
        engine.emit([[], engine.propose()[1]])
        num_forwards += 1
    assert num_forwards < 60 - 10


def test_drafts_do_not_continue_over_a_gap_of_a_response_in_the_ring(tmp_path: Path) -> None:
    drafter = Drafter(max_draft_tokens=K, segments_dir=str(tmp_path))
    engine = Engine(drafter, [list(range(100, 130))], keys=[1])
    for step in range(12):
        drafter._state.ring_trials[PAYS] = not 4 <= step < 8
        drafter._num_forwards = 1  # not one of the seldom looks
        engine.propose(room=0)
        engine.emit([[]])
    ring = drafter._state.ring
    follows = (ring[:-1] >= 0) & (ring[1:] >= 0)
    assert follows.sum() > 5
    assert (ring[1:][follows] == ring[:-1][follows] + 1).all()
