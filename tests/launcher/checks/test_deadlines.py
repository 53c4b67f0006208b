"""Time limits that a healthy trainer would miss are refused."""

from launcher.checks.deadlines import deadline_problems, deadline_warnings, warnings_of_estimate
from launcher.config.schema import RunConfig
from megatron_rl.config import TrainerConfig
from tests.launcher.checks.test_formats import CPU, GPU

VALUES = {"model": "m", "run_dir": "r", "num_steps": 1, "data": {"train": [{"path": "t.jsonl"}]}}


def test_a_limit_that_the_first_micro_batch_on_a_gpu_may_miss_is_refused() -> None:
    (problem,) = deadline_problems(TrainerConfig(progress_timeout_s=59), GPU)
    assert "`trainer.progress_timeout_s` = 59" in problem and "60 or more" in problem
    assert deadline_problems(TrainerConfig(progress_timeout_s=60), GPU) == []
    assert deadline_problems(TrainerConfig(progress_timeout_s=1), CPU) == []
    assert deadline_problems(TrainerConfig(), GPU) == []


def test_a_limit_of_progress_above_that_of_a_call_causes_a_warning() -> None:
    (warning,) = deadline_warnings(RunConfig.model_validate({**VALUES, "trainer": {"timeout_s": 120}}))
    assert "= 600" in warning and "`trainer.timeout_s` = 120" in warning
    assert deadline_warnings(RunConfig.model_validate(VALUES)) == []


def test_a_limit_of_a_publish_above_that_of_its_engines_causes_a_warning() -> None:
    values = {**VALUES, "publish": {"timeout_s": 900}}
    (warning,) = deadline_warnings(RunConfig.model_validate(values))
    assert "`publish.timeout_s` = 900 has no effect" in warning and "`engine.update_timeout_s` = 300" in warning
    assert deadline_warnings(RunConfig.model_validate({**values, "engine": {"update_timeout_s": 900}})) == []


def test_limits_near_the_estimate_of_training_cause_warnings() -> None:
    config = RunConfig.model_validate(VALUES)
    assert warnings_of_estimate(config, 500.0) == []
    late_stop, late_call = warnings_of_estimate(config, 600.0), warnings_of_estimate(config, 1000.0)
    assert len(late_stop) == 1 and "stop 600 s before" in late_stop[0] and "set it to 1200 or more" in late_stop[0]
    assert len(late_call) == 2 and "`trainer.timeout_s` = 1800 ends a trainer" in late_call[0]
    longer = {"trainer": {"timeout_s": 2000}, "cluster": {"slurm": {"stop_before_s": 2000}}}
    assert warnings_of_estimate(RunConfig.model_validate({**VALUES, **longer}), 1000.0) == []
