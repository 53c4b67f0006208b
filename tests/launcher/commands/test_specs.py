"""Specifications of a run's processes, from its configuration."""

from launcher.commands.specs import trainer_spec
from launcher.config.schema import RunConfig
from rollout.weights.format import WeightFormat


def test_the_schedule_of_a_trainer_counts_every_optimizer_step_of_the_run():
    config = RunConfig.model_validate(
        {
            "model": "m",
            "run_dir": "r",
            "num_steps": 7,
            "data": {"train": [{"path": "x.jsonl"}]},
            "algorithm": {"prompts_per_step": 6, "num_mini_batches": 3, "num_epochs": 2},
        }
    )
    assert trainer_spec(config, WeightFormat(name="bf16"), "run").total_updates == 7 * 3 * 2
