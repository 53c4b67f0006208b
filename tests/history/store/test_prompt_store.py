"""A shard's store: the last visits within a byte budget, for any order of calls and any thread."""

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.drafting.store_soak import soak
from history.store.actors import Shard
from history.store.prompt_store import RESPONSE_BYTES, PromptStore, expected_wait
from history.store.response_batch import ResponseBatch
from history.types import PastResponse
from tests.support.responses import is_right, response, visit


def store(*, budget_bytes: int = 1 << 30, kept_steps: int = 1, reuse_share=lambda before, now: 0.5) -> PromptStore:
    return PromptStore(budget_bytes=budget_bytes, kept_steps=kept_steps, reuse_share=reuse_share)


def steps_and_samples(found: PromptStore, key: int) -> list[tuple[int, int]]:
    return [(one.step, one.sample) for _, past in found.fetch([key]).values() for one in past]


def pay(found: PromptStore, key: int, step: int, *, num_samples: int = 4) -> None:
    found.note_rewards(key, step, [float(sample) for sample in range(num_samples)])


def test_only_a_complete_visit_replaces_the_one_before_it():
    kept = store()
    kept.append(1, visit(1, 0))
    pay(kept, 1, 0)
    kept.append(1, visit(1, 5)[:3])
    pay(kept, 1, 5)
    assert steps_and_samples(kept, 1) == [(0, s) for s in range(4)] + [(5, s) for s in range(3)]
    kept.append(1, visit(1, 5)[3:])
    assert steps_and_samples(kept, 1) == [(5, s) for s in range(4)]
    assert [one.reward for one in kept.fetch([1])[1][1]] == [0.0, 1.0, 2.0, 3.0]


@given(st.permutations(range(6)), st.integers(0, 6))
def test_rewards_and_responses_may_arrive_in_any_order_and_twice(order, when):
    kept = store()
    kept.append(1, visit(1, 0))
    pay(kept, 1, 0)
    for position, sample in enumerate([*order, order[0]]):
        if position == when:
            pay(kept, 1, 3, num_samples=6)
        kept.append(1, [response(1, 3, sample)])
    if when == 0:  # nothing of the visit was there yet: the rewards came too early and are ignored
        pay(kept, 1, 3, num_samples=6)
    assert steps_and_samples(kept, 1) == [(3, s) for s in range(6)]
    assert [one.reward for one in kept.fetch([1])[1][1]] == [float(s) for s in range(6)]
    kept.measure_returns()
    (only,) = kept.drain_returns()
    assert (only.num_tokens, only.mean_length, only.reusable_share) == (72, 12.0, 0.5)
    kept.check_integrity()


def test_visits_without_rewards_are_bounded_too():
    kept = store(kept_steps=2)
    for step in range(10):
        kept.append(1, visit(1, step))
    assert {step for step, _ in steps_and_samples(kept, 1)} == {7, 8, 9}


def test_the_store_copies_the_callers_arrays():
    kept = store()
    ids = np.arange(5, dtype=np.int32)
    kept.append(1, [PastResponse(token_ids=ids, step=0, sample=0)])
    ids[:] = 9
    (found,) = kept.fetch([1])[1][1]
    assert found.token_ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        found.token_ids[0] = 1


def test_a_stamp_changes_with_the_responses_and_avoids_sending_them_again():
    kept = store()
    kept.append(1, visit(1, 0))
    first, past = kept.fetch([1, 2])[1]
    assert len(past) == 4
    assert kept.fetch([1], {1: first}) == {1: (first, [])}
    kept.append(1, visit(1, 1))
    second, past = kept.fetch([1], {1: first})[1]
    assert second > first
    assert len(past) == 8


def test_empty_responses_are_left_out():
    kept = store()
    kept.append(1, [PastResponse(token_ids=np.zeros(0, dtype=np.int32), step=0, sample=0)])
    assert kept.fetch([1]) == {}
    kept.check_integrity()


def test_counted_bytes_equal_the_bytes_of_responses():
    import tracemalloc

    kept = store()
    kept.append(0, visit(0, 0, num_samples=16))
    tracemalloc.start()
    for key in range(1, 201):
        kept.append(key, visit(key, 0, num_samples=16))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept.stats().num_bytes == 201 * 16 * (48 + RESPONSE_BYTES)
    assert 0.8 < used / (200 * 16 * (48 + RESPONSE_BYTES)) < 1.1


def shuffled_walk(kept: PromptStore, *, num_prompts: int, epochs: int, per_step: int, seed: int) -> float:
    """Share of visits from the second epoch on whose prompt is still stored."""
    generator, hits, step = random.Random(seed), [], 0
    for epoch in range(epochs):
        order = generator.sample(range(num_prompts), num_prompts)
        for start in range(0, num_prompts, per_step):
            for key in order[start : start + per_step]:
                if epoch:
                    hits.append(bool(kept.fetch([key])))
                kept.append(key, visit(key, step))
                pay(kept, key, step)
            step += 1
    kept.check_integrity()
    return sum(hits) / len(hits)


@pytest.mark.parametrize("room", [0.25, 0.5])
def test_half_the_budget_keeps_about_half_the_hits_unlike_least_recently_used(room):
    num_prompts, one = 400, 4 * (48 + RESPONSE_BYTES)
    kept = store(budget_bytes=int(room * num_prompts * one))
    rate = shuffled_walk(kept, num_prompts=num_prompts, epochs=5, per_step=8, seed=1)
    # with room for a share r of the prompts, the best that least-recently-used can do on this walk is r^2 / 2
    assert rate > 0.7 * room
    assert rate > 2 * room**2 / 2
    assert kept.stats().num_evictions > 0


def epochs_of(*sizes: int, per_step: int, steps: int, seed: int) -> list[tuple[int, int]]:
    """(step, prompt) of interleaved data sets in shuffled epochs; set n has the prompts from 1000 n on."""
    generator, orders, walk = random.Random(seed), [[] for _ in sizes], []
    for step in range(steps):
        for number, size in enumerate(sizes):
            for _ in range(per_step):
                if not orders[number]:
                    orders[number] = generator.sample(range(size), size)
                walk.append((step, 1000 * number + orders[number].pop()))
    return walk


def were_stored(kept: PromptStore, walk: list[tuple[int, int]]) -> list[bool]:
    found = []
    for step, key in walk:
        found.append(bool(kept.fetch([key])))
        kept.append(key, visit(key, step))
        pay(kept, key, step)
    kept.check_integrity()
    return found


def most_stored(walk: list[tuple[int, int]], room: int) -> list[bool]:
    """The same for a store that knows the future: it evicts the prompt that returns last."""
    following, returns = {}, []
    for place, (_, key) in reversed(list(enumerate(walk))):
        returns.append(following.get(key, len(walk)))
        following[key] = place
    stored, found = {}, []
    for (_, key), back in zip(walk, reversed(returns), strict=True):
        found.append(key in stored)
        stored[key] = back
        if len(stored) > room:
            del stored[max(stored, key=stored.__getitem__)]
    return found


@pytest.mark.parametrize("room", [110, 220])
def test_data_sets_of_different_size_are_stored_almost_as_if_the_future_were_known(room):
    walk = epochs_of(40, 400, per_step=4, steps=400, seed=1)
    kept = store(budget_bytes=room * 4 * (48 + RESPONSE_BYTES))
    kept.note_epochs({key: 10 if key < 1000 else 100 for _, key in walk})
    found = were_stored(kept, walk)
    assert sum(found) > 0.95 * sum(most_stored(walk, room))
    small = [hit for hit, (step, key) in zip(found, walk, strict=True) if key < 1000 and step >= 10]
    assert sum(small) > 0.95 * len(small), "it returns ten times sooner"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_prompt_that_is_put_back_does_not_end_the_epoch_of_the_others(is_known):
    walk = epochs_of(400, per_step=8, steps=100, seed=1)
    walk = sorted([*walk, (11, walk[80][1])], key=lambda one: one[0])  # visited in steps 10 and 11
    kept = store(budget_bytes=100 * 4 * (48 + RESPONSE_BYTES))
    if is_known:
        kept.note_epochs(dict.fromkeys(range(400), 50))
    assert sum(were_stored(kept, walk)[401:]) > 0.9 * 100, "there is room for 100, and 400 return"


def test_visits_of_another_run_are_not_older_than_an_epoch():
    """Each of its prompts comes in the first epoch of this run, also if it was visited long before."""
    kept = store(budget_bytes=100 * 4 * (48 + RESPONSE_BYTES))
    kept.note_epochs(dict.fromkeys(range(200), 50))
    for key in range(80):
        kept.append(key, visit(key, -300 + key))
    for step in range(40):
        kept.append(100 + step, visit(100 + step, step))
        pay(kept, 100 + step, step)
    kept.check_integrity()
    assert all(kept.fetch([key]) for key in range(80))


def test_other_prompts_have_the_longest_epoch_and_all_have_the_whole_time_if_none_is_known():
    kept = store()
    for step in (3, 33):
        kept.append(1, visit(1, step))
    assert kept._epoch_steps([1, 2]).tolist() == [30.0, 30.0]
    kept.note_epochs({1: 4, 2: 390})
    assert kept._epoch_steps([1, 2, EVALUATED]).tolist() == [4.0, 390.0, 390.0]


EVALUATED = 1000


def evaluate(kept: PromptStore, step: int, *, num_samples: int = 1, length: int = 1) -> None:
    """One evaluation of the prompt EVALUATED, as engines report it: without rewards."""
    kept.append(EVALUATED, visit(EVALUATED, step, num_samples=num_samples, length=length))
    kept.note_rewards(EVALUATED, step, [float("nan")] * num_samples)


def stored_after_each_step(*, evaluated_at: tuple[int, ...]) -> list[set[int]]:
    """Training prompts that are stored after each step of an epoch of 120 steps, with room for 40."""
    # the last bytes are room for two visits of an evaluation, and less than a visit of training
    kept, found = store(budget_bytes=40 * 4 * (48 + RESPONSE_BYTES) + 600), []
    for step in range(120):
        if step in evaluated_at:
            evaluate(kept, step)
        kept.append(step, visit(step, step))
        pay(kept, step, step)
        found.append({key for key in range(120) if kept.fetch([key])})
    kept.check_integrity()
    assert kept.stats().num_evictions >= 80
    return found


def test_evaluations_evict_no_other_training_prompts():
    alone = stored_after_each_step(evaluated_at=())
    assert 0 in alone[-1], "what was seen longest ago returns soonest"
    assert stored_after_each_step(evaluated_at=(0, 20)) == alone
    assert stored_after_each_step(evaluated_at=(0, 20, 40, 60, 80, 100)) == alone


@pytest.mark.parametrize("kept_steps", [1, 2])
def test_evaluations_are_kept_as_long_as_visits_of_training_and_are_no_returns(kept_steps):
    kept = store(kept_steps=kept_steps)
    for step in range(0, 100, 20):
        evaluate(kept, step, num_samples=4)
        assert len({one for one, _ in steps_and_samples(kept, EVALUATED)}) == min(step // 20 + 1, kept_steps)
    kept.measure_returns()
    assert kept.drain_returns() == []


def test_the_store_is_not_locked_while_the_reuse_of_a_prompt_is_measured():
    free = []

    def try_lock():
        free.append(kept._lock.acquire(blocking=False))
        if free[-1]:
            kept._lock.release()

    def share(before, now):
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return 0.25

    kept = store(reuse_share=share)
    for step in range(2):
        kept.append(1, visit(1, step))
        pay(kept, 1, step)
    kept.measure_returns()
    assert free == [True]
    assert [one.reusable_share for one in kept.drain_returns()] == [0.25]


def test_a_shard_measures_reuse_in_a_thread_that_answers_no_calls(monkeypatch):
    threads = []

    def share(before, now):
        threads.append(threading.current_thread())
        return 0.25

    monkeypatch.setattr("history.lengths.reuse.reusable_share", share)
    monkeypatch.setattr("history.store.actors._this_process", lambda: None)  # it asks Ray
    shard = Shard(0, 1, 1 << 20, 1)
    for step in range(2):
        shard.append(ResponseBatch.of((1, one) for one in visit(1, step)))
        shard.note_rewards(step, {1: [0.0, 1.0, 0.0, 1.0]})
    shard._thread.shutdown()
    assert len(threads) == 1 and threading.current_thread() not in threads
    assert [one.reusable_share for one in shard.report().returns] == [0.25]


def test_a_failed_measurement_of_reuse_is_reported_once(monkeypatch):
    def share(before, now):
        raise ValueError("bad visit")

    monkeypatch.setattr("history.lengths.reuse.reusable_share", share)
    monkeypatch.setattr("history.store.actors._this_process", lambda: None)  # it asks Ray
    shard = Shard(0, 1, 1 << 20, 1)
    for step in range(2):
        shard.append(ResponseBatch.of((1, one) for one in visit(1, step)))
        shard.note_rewards(step, {1: [0.0, 1.0, 0.0, 1.0]})
    shard._thread.shutdown()
    with pytest.raises(ValueError, match="bad visit"):
        shard.report()
    assert shard.report().stats.num_prompts == 1


def test_prompts_that_repeat_themselves_are_evicted_last():
    one = 4 * (4 * 13 + RESPONSE_BYTES)
    kept = store(budget_bytes=41 * one, reuse_share=lambda before, now: float(len(now[0].token_ids) - 12))
    for step in range(2):
        for key in range(40):
            kept.append(key, visit(key, step, length=12 + key % 2))
            pay(kept, key, step)
    kept.measure_returns()
    shares = [came.reusable_share for came in kept.drain_returns()]
    assert shares.count(0.0) == shares.count(1.0) == 20
    for key in range(100, 115):
        kept.append(key, visit(key, 2))
    left = [key for key in range(40) if kept.fetch([key])]
    assert sum(key % 2 for key in left) == 20
    assert sum(key % 2 == 0 for key in left) < 10


@pytest.mark.parametrize("age", [0.0, 3.0, 9.9, 10.0, 15.0, 19.0])
def test_the_expected_wait_is_that_of_two_shuffled_epochs(age):
    generator = np.random.default_rng(0)
    intervals = generator.uniform(0, 10, 400_000) + generator.uniform(0, 10, 400_000)
    residual = (intervals[intervals > age] - age).mean()
    assert expected_wait(np.array([age]), np.array([10.0]))[0] == pytest.approx(residual, rel=0.02)
    assert expected_wait(np.array([20.5, 20.5]), np.array([10.0, 11.0])).tolist() == [np.inf, pytest.approx(0.5)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60))
def test_a_store_within_budget_equals_a_dictionary_of_the_last_visits(orders):
    """Against a plain model that holds every response; the store must return the newest visits of a prompt."""
    kept, model, paid = store(), {}, set()
    for key, step, sample, reward in orders:
        if reward:
            kept.note_rewards(key, step, [1.0, 1.0, 1.0])
            if any((key, step) == known[:2] for known in model):
                paid.add((key, step))
        else:
            kept.append(key, [response(key, step, sample)])
            model[key, step, sample] = True
        kept.check_integrity()
    for key in range(6):
        found = steps_and_samples(kept, key)
        steps = sorted({step for known, step, _ in model if known == key})
        assert set(found) <= {(step, sample) for known, step, sample in model if known == key}
        assert {step for step, _ in found} <= set(steps)
        if steps and (key, steps[-1]) not in paid:
            newest = {(s, sample) for known, s, sample in model if known == key and s == steps[-1]}
            assert newest <= set(found)
        assert all(is_right(key, one) for _, past in kept.fetch([key]).values() for one in past)


def test_a_batch_round_trips_and_splits_by_owner():
    entries = [(key, one) for key in (5, 2, 9, 2) for one in visit(key, key)[: key % 4 + 1]]
    batch = ResponseBatch.of(entries)
    assert len(batch) == len(entries)
    for (key, went_in), (found_key, came_out) in zip(entries, batch.entries(), strict=True):
        assert (key, went_in.step, went_in.sample) == (found_key, came_out.step, came_out.sample)
        assert is_right(key, came_out)
    parts = batch.split(3)
    assert [sorted({key for key, _ in part.entries()}) for part in parts] == [[9], [], [2, 5]]
    assert sum(map(len, parts)) == len(batch)
    assert len(ResponseBatch.of([])) == 0
    assert list(ResponseBatch.of([]).split(2)[1].entries()) == []


@pytest.mark.slow
def test_a_soak_from_several_threads_reads_no_wrong_token_and_does_not_grow():
    before = threading.active_count()
    result = soak(num_inserts=96_000, num_writers=2, num_readers=2, seed=3)
    assert result.num_inserts >= 96_000
    assert result.num_wrong_tokens == 0
    assert result.num_evictions > 1000
    assert result.num_reads > 1000
    assert result.num_segments > 10
    assert result.growth < 0.2
    assert threading.active_count() == before
