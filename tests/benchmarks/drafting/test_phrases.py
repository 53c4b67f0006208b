"""Responses of the second model: their reuse, how siblings differ, and that they repeat."""

import numpy as np
import pytest

from benchmarks.drafting.phrases import generate
from benchmarks.drafting.traces import END_OF_SEQUENCE, SIBLINGS


def pairs(tokens: np.ndarray) -> set[tuple[int, ...]]:
    """All runs of four tokens."""
    return {tuple(tokens[i : i + 4].tolist()) for i in range(len(tokens) - 3)}


@pytest.mark.parametrize("reuse", [0.93, 0.5, 0.0])
def test_the_share_of_known_text_is_the_reuse(reuse: float) -> None:
    made = generate(reuse=reuse, num_tokens=600, num_prompts=6, seed=3)
    known: dict[str, set[tuple[int, ...]]] = {}
    found, total = 0, 0
    for trace in made.traces:
        if trace.step == 0:
            known.setdefault(trace.prompt_id, set()).update(pairs(trace.response_ids))
        else:
            own = pairs(trace.response_ids)
            found, total = found + len(own & known[trace.prompt_id]), total + len(own)
    # phrases that follow each other for the first time break a run; a repetition within a response is copied, too
    assert made.reuse == pytest.approx(reuse, abs=0.06)
    assert reuse - 0.25 < found / total < reuse + 0.06


def test_every_prompt_has_its_siblings_in_both_epochs_and_each_ends() -> None:
    made = generate(reuse=0.8, num_tokens=300, num_prompts=4, seed=1)
    assert len(made.traces) == 2 * 4 * SIBLINGS
    assert all(trace.response_ids[-1] == END_OF_SEQUENCE for trace in made.traces)
    assert all((trace.response_ids[:-1] != END_OF_SEQUENCE).all() for trace in made.traces)
    assert len({trace.response_ids.tobytes() for trace in made.traces}) == len(made.traces)
    assert 150 < np.mean([len(trace.response_ids) for trace in made.traces]) < 450


def test_the_same_arguments_give_the_same_responses() -> None:
    first, again, other = (generate(reuse=0.8, num_tokens=100, num_prompts=2, seed=seed).traces for seed in (1, 1, 2))
    assert [trace.response_ids.tolist() for trace in first] == [trace.response_ids.tolist() for trace in again]
    assert [trace.response_ids.tolist() for trace in first] != [trace.response_ids.tolist() for trace in other]
    with pytest.raises(ValueError, match=r"reuse 1\.5"):
        generate(reuse=1.5, num_tokens=10, num_prompts=1)
