import numpy as np
import pytest

from benchmarks.drafting.traces import END_OF_SEQUENCE, SIBLINGS, generate
from history.store.traces import Trace


def test_same_arguments_give_the_same_traces() -> None:
    first, second = (generate(reuse=0.87, num_tokens=300, num_prompts=2, seed=3).traces for _ in range(2))
    other = generate(reuse=0.87, num_tokens=300, num_prompts=2, seed=4).traces
    assert all(np.array_equal(a.response_ids, b.response_ids) for a, b in zip(first, second, strict=True))
    assert not np.array_equal(first[0].response_ids, other[0].response_ids)


def test_epoch_0_does_not_depend_on_reuse() -> None:
    first, second = (generate(reuse=reuse, num_tokens=300, num_prompts=2).traces[:16] for reuse in (0.0, 0.93))
    assert all(np.array_equal(a.response_ids, b.response_ids) for a, b in zip(first, second, strict=True))


def test_generated_traces_equal_the_frozen_ones() -> None:
    traces = generate(reuse=0.87, num_tokens=300, num_prompts=2).traces
    found = [trace.response_ids[100:104].tolist() for trace in traces[::9]]
    assert found == [
        [28338, 31470, 28712, 8345],
        [16834, 16912, 741, 1],
        [30, 19060, 16592, 2257],
        [25771, 46, 1, 16834],
    ]


def test_traces_are_ordered_and_have_about_the_requested_length() -> None:
    traces = generate(reuse=0.87, num_tokens=1000, num_prompts=40, num_epochs=3).traces
    assert [trace.step for trace in traces] == sorted(trace.step for trace in traces)
    assert len(traces) == 3 * 40 * SIBLINGS
    lengths = [len(trace.response_ids) for trace in traces]
    assert 900 < np.mean(lengths) < 1150
    assert all(trace.response_ids[-1] == END_OF_SEQUENCE for trace in traces)
    assert all((trace.response_ids[:-1] > 0).all() for trace in traces)


@pytest.mark.parametrize("reuse", [0.93, 0.87, 0.76, 0.6, 0.4, 0.2])
def test_traces_have_the_requested_reuse(reuse: float) -> None:
    found = generate(reuse=reuse, num_tokens=2000, num_prompts=16)
    assert abs(found.reuse - reuse) < 0.02


def test_reuse_shows_in_common_token_sequences() -> None:
    found = generate(reuse=0.87, num_tokens=1000, num_prompts=8)
    spans = np.concatenate([copied_spans(found.traces, prompt_id) for prompt_id in prompt_ids(found.traces)])
    total = sum(len(trace.response_ids) for trace in found.traces if trace.step == 1)
    # spans of fewer than four tokens may occur by chance, and an edit may repeat the old token
    assert 0.75 < spans.sum() / total < 0.90


def test_lengths_of_copied_spans_are_heavy_tailed() -> None:
    found = generate(reuse=0.87, num_tokens=2000, num_prompts=8)
    spans = np.concatenate([copied_spans(found.traces, prompt_id) for prompt_id in prompt_ids(found.traces)])
    beyond = spans - spans.min()
    # 1 and exp(-4) for spans that break with equal chance at every token
    assert beyond.std() / beyond.mean() > 1.15
    assert (beyond > 4 * beyond.mean()).mean() > 1.25 * np.exp(-4)


def test_siblings_share_the_edits_of_their_policy() -> None:
    found = generate(reuse=0.87, num_tokens=1000, num_prompts=8)
    old, new = ([trace for trace in found.traces if trace.step == step] for step in (0, 1))
    fresh = [grams(trace) - set().union(*(grams(o) for o in old if o.prompt_id == trace.prompt_id)) for trace in new]
    shared = [
        len(mine & set().union(*(fresh[other] for other in range(len(new)) if same_group(new, i, other)))) / len(mine)
        for i, mine in enumerate(fresh)
    ]
    assert 0.15 < np.mean(shared) < 0.9


def test_nothing_is_shared_without_reuse() -> None:
    traces = generate(reuse=0.0, num_tokens=1000, num_prompts=2).traces
    spans = np.concatenate([copied_spans(traces, prompt_id) for prompt_id in prompt_ids(traces)])
    assert spans.sum() / (2 * SIBLINGS * 1000) < 0.02


def test_impossible_reuse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"reuse 1\.0: must lie between 0 and 0\.95"):
        generate(reuse=1.0, num_tokens=100, num_prompts=1)


def prompt_ids(traces: list[Trace]) -> list[str]:
    return sorted({trace.prompt_id for trace in traces})


def grams(trace: Trace, size: int = 4) -> set[tuple[int, ...]]:
    ids = trace.response_ids.tolist()
    return {tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)}


def same_group(traces: list[Trace], one: int, other: int) -> bool:
    return one != other and traces[one].prompt_id == traces[other].prompt_id


def copied_spans(traces: list[Trace], prompt_id: str, shortest: int = 4) -> np.ndarray:
    """Lengths of maximal spans of new responses that occur in old ones, greedily from the left."""
    of_prompt = [trace for trace in traces if trace.prompt_id == prompt_id]
    text = [token for trace in of_prompt if trace.step == 0 for token in [*trace.response_ids.tolist(), -1]]
    places: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(text) - shortest + 1):
        places.setdefault(tuple(text[i : i + shortest]), []).append(i)
    spans = []
    for trace in of_prompt:
        ids, i = trace.response_ids.tolist(), 0
        while trace.step == 1 and i < len(ids):
            length = max(
                (common(text, place, ids, i) for place in places.get(tuple(ids[i : i + shortest]), [])), default=0
            )
            if length:
                spans.append(length)
            i += max(length, 1)
    return np.array(spans)


def common(text: list[int], place: int, ids: list[int], begin: int) -> int:
    return next((k for k in range(len(ids) - begin) if text[place + k] != ids[begin + k]), len(ids) - begin)
