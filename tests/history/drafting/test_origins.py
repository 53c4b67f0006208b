"""Age and reward of past responses as features: binned as documented, learned, and used."""

from pathlib import Path

import numpy as np
import pytest

from history.drafting.acceptance import LIVING, NUM_ORIGINS, origin_at, origins, scaled, update_origin
from history.drafting.drafter import Drafter
from history.index.segment import build_segment, write_segment
from history.types import PastResponse
from tests.history.drafting.test_drafter import Engine, Text, edited

NAN = float("nan")


def test_an_origin_encodes_age_and_reward() -> None:
    now = 40
    steps = [now, now - 1, now - 2, now - 3, now - 4, now - 7, now - 8, -500, now + 3]
    ages = origins(steps, [NAN] * len(steps), now)
    assert len(set(ages.tolist())) == 6
    assert ages[0] == ages[8] < ages[1] < ages[2] == ages[3] < ages[4] == ages[5] < ages[6] < ages[7]
    worths = origins([0] * 4, [1.0, 0.0, 0.5, NAN], 1)
    assert worths[3] < worths[1] < worths[2] < worths[0]
    assert len(set(origins([0, 0], [1.0, 1.0], 1).tolist())) == 1
    every = {int(one) for step in range(200) for one in origins([step] * 5, [NAN, 0.0, 1.0, 0.5, 0.5], 199)} | {
        int(origins([0], [1.0], 1)[0])
    }
    assert LIVING not in every
    assert max(every) == NUM_ORIGINS - 1
    assert len(origins([], [], 3)) == 0


def test_a_position_has_the_origin_of_its_response() -> None:
    starts = np.array([1, 5, 6, 20], dtype=np.int32)
    found = np.array([7, 8, 9, 10], dtype=np.int32)
    naive = [found[np.flatnonzero(starts <= position)[-1]] for position in range(1, 40)]
    responses = np.concatenate([starts, found])
    assert [origin_at(responses, position) for position in range(1, 40)] == naive


@pytest.mark.parametrize("truth", [0.5, 1.0, 2.0])
def test_a_scale_converges_to_the_ratio_of_actual_to_expected_rejections(truth: float) -> None:
    sums, scales = np.zeros((NUM_ORIGINS, 2), np.float32), np.ones(NUM_ORIGINS, np.float32)
    generator = np.random.default_rng(0)
    for _ in range(30_000):
        rejection = generator.uniform(0.05, 0.4)
        update_origin(sums, scales, 3, rejection, bool(generator.random() < truth * rejection))
    assert scales[3] == pytest.approx(truth, rel=0.1)
    assert (np.delete(scales, 3) == 1).all()
    assert scaled(0.9, scales[3]) == pytest.approx(1 - truth * 0.1, abs=0.02)
    assert scaled(0.1, 4.0) == 0.0


def test_drafts_from_responses_with_higher_reward_get_higher_survival(tmp_path: Path) -> None:
    """The policy repeats rewarded responses of every prompt and half forgets the others."""
    generator = np.random.default_rng(1)
    drafter = Drafter(max_draft_tokens=8, segments_dir=str(tmp_path))
    for key in range(1, 25):
        paid: list[Text] = [generator.integers(0, 600, size=200).tolist() for _ in range(2)]
        poor: list[Text] = [generator.integers(0, 600, size=200).tolist() for _ in range(2)]
        past = [
            PastResponse(token_ids=np.array(text, np.int32), step=0, sample=i, reward=1.0 if i < 2 else 0.0)
            for i, text in enumerate([*paid, *poor])
        ]
        write_segment(tmp_path, build_segment(key, 1, past))
        new = [edited(generator, text, 0.02) for text in paid] + [edited(generator, text, 0.2) for text in poor]
        Engine(drafter, new, keys=[key] * 4).run()
    scales = drafter._state.origin_scales
    better, worse = (int(one) for one in origins([0, 0], [1.0, 0.0], 0))
    # match lengths show most of the difference; this is the rest
    assert scales[better] < 0.97
    assert scales[worse] > 1.03
    assert drafter.drain().calibration_error() < 0.05
