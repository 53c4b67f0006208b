"""Groups of evaluation sets."""

from launcher.commands.evaluate import evaluation_of
from launcher.config.schema import RunConfig
from rollout.config import EvalSetConfig
from rollout.pool.evaluator import Evaluator
from tests.rollout.planning.test_planner import prompt

SETS = {"held": EvalSetConfig(path="held.jsonl", samples_per_prompt=2, temperature=1.0)}


def test_evaluations_stop_where_training_stops() -> None:
    """Else a model whose turns end with such a token is sampled to the limit."""
    prompts = {"held": (prompt(0), prompt(1))}
    evaluator = Evaluator(SETS, prompts, format="bf16", seed=1, stop_token_ids=[7])
    ((first, second),) = evaluator.upcoming(0)
    assert first.sampling.stop_token_ids == second.sampling.stop_token_ids == (7,)
    assert len({*first.seeds, *second.seeds}) == 4
    assert evaluator.upcoming(5)[0][0].seeds == first.seeds, "the same at every step"


def test_an_evaluation_of_a_runs_models_stops_where_training_stops() -> None:
    values = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "t.jsonl"}]}}
    config = RunConfig.model_validate({**values, "sampling": {"stop_token_ids": [7]}})
    assert evaluation_of(config, "m", config.engine).stop_token_ids == (7,)
