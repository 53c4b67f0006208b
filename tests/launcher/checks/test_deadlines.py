"""Time limits that a healthy trainer would miss are refused."""

from launcher.checks.deadlines import deadline_problems, deadline_warnings
from megatron_rl.config import TrainerConfig
from tests.launcher.checks.test_formats import CPU, GPU


def test_a_limit_that_the_first_micro_batch_on_a_gpu_may_miss_is_refused() -> None:
    (problem,) = deadline_problems(TrainerConfig(progress_timeout_s=59), GPU)
    assert "`trainer.progress_timeout_s` = 59" in problem and "60 or more" in problem
    assert deadline_problems(TrainerConfig(progress_timeout_s=60), GPU) == []
    assert deadline_problems(TrainerConfig(progress_timeout_s=1), CPU) == []
    assert deadline_problems(TrainerConfig(), GPU) == []


def test_a_limit_of_progress_above_that_of_a_call_causes_a_warning() -> None:
    (warning,) = deadline_warnings(TrainerConfig(timeout_s=120))
    assert "= 600" in warning and "`trainer.timeout_s` = 120" in warning
    assert deadline_warnings(TrainerConfig()) == []
