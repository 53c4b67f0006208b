"""Groups of evaluation sets."""

from pathlib import Path

import pytest

from launcher.commands.evaluate import evaluation_of, run_settings
from launcher.config.schema import RunConfig
from rollout.config import EvalSetConfig
from rollout.evaluation import settings_digest
from rollout.pool.evaluator import FIRST_GROUP_ID, Evaluator
from rollout.types import PromptGroup, ScoredGroup
from tests.rollout.planning.test_planner import prompt
from tests.support.scored_groups import scored_group


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, EvalSetConfig]:
    path = tmp_path / "held.jsonl"
    path.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    return {"held": EvalSetConfig(path=str(path), samples_per_prompt=2, temperature=1.0)}


def test_evaluations_stop_where_training_stops(sets: dict[str, EvalSetConfig]) -> None:
    """Else a model whose turns end with such a token is sampled to the limit."""
    prompts = {"held": (prompt(0), prompt(1))}
    evaluator = Evaluator(sets, prompts, format="bf16", seed=1, stop_token_ids=[7], run_settings="r")
    first, second = evaluator.upcoming(0)
    assert first.sampling.stop_token_ids == second.sampling.stop_token_ids == (7,)
    assert len({*first.seeds, *second.seeds}) == 4
    assert evaluator.upcoming(5)[0].seeds == first.seeds, "the same at every step"


def test_all_sets_are_admitted_at_once_and_their_groups_have_numbers_of_their_own(
    sets: dict[str, EvalSetConfig],
) -> None:
    """Engines that sample one set after another wait for the longest answer of each."""
    log: list[object] = []

    class Pool:
        def admit(self, groups: list[PromptGroup]) -> None:
            log.append([(group.purpose, group.step, int(group.group_id) - FIRST_GROUP_ID) for group in groups])

        def take(self, purpose: str, step: int, *, progress: object) -> list[ScoredGroup]:
            del progress
            log.append((purpose, step))
            return [scored_group(0)]

    sets = {"one": sets["held"], "two": sets["held"].model_copy(update={"max_response_tokens": 8192})}
    prompts = {name: (prompt(0), prompt(1)) for name in sets}
    evaluator = Evaluator(sets, prompts, format="bf16", seed=1, stop_token_ids=[], run_settings="r")
    upcoming = evaluator.upcoming(3)
    evaluator.admit(Pool(), 3)  # type: ignore[arg-type]
    rows = evaluator.take(Pool(), 3)  # type: ignore[arg-type]
    evaluator.admit(Pool(), 4)  # type: ignore[arg-type]
    first, *taken, second = log
    assert first == [("one", 3, 0), ("one", 3, 1), ("two", 3, 2), ("two", 3, 3)]
    assert [int(group.group_id) - FIRST_GROUP_ID for group in upcoming] == [0, 1, 2, 3]
    assert taken == [("one", 3), ("two", 3)] and [row.set_name for row in rows] == ["one", "two"]
    assert [row.settings for row in rows] == [settings_digest(each) for each in sets.values()]
    assert {row.run_settings for row in rows} == {"r"}
    assert second == [("one", 4, 4), ("one", 4, 5), ("two", 4, 6), ("two", 4, 7)]


def test_an_evaluation_of_a_runs_models_stops_where_training_stops() -> None:
    values = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "t.jsonl"}]}}
    config = RunConfig.model_validate({**values, "sampling": {"stop_token_ids": [7]}})
    assert evaluation_of(config, "m", config.engine).stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("changed", "is_comparable"),
    [
        ({"sampling": {"stop_token_ids": [7]}}, False),
        ({"data": {"train": [{"path": "t.jsonl"}], "chat_template_arguments": {"enable_thinking": False}}}, False),
        ({"reward": {"function": "rollout.rewards.math.compute_score"}}, False),
        ({"reward": {"num_workers": 3, "timeout_s": 99.0, "failure_score": 0.0}}, True),
        ({"engine": {"num_engines": 2}, "seed": 3}, True),
    ],
)
def test_the_settings_that_all_sets_of_a_run_share_decide_whether_evaluations_are_comparable(
    changed: dict[str, object], is_comparable: bool
) -> None:
    values = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "t.jsonl"}]}}
    before, now = (RunConfig.model_validate(values | parts) for parts in ({}, changed))
    digests = [run_settings(evaluation_of(config, "m", config.engine)) for config in (before, now)]
    assert (digests[0] == digests[1]) is is_comparable
