"""Estimate of a step's time and of the run's cost, from the estimates of its phases. Pure.

Colocated phases follow each other. Disaggregated engines sample ahead while the trainer works (`planner.overlap`): the
slower side decides. Engines that sample ahead have a full queue, so they are saturated; otherwise a step ends with its
longest response.
"""

from dataclasses import dataclass

from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_time import PublishEstimate, publish_estimate
from launcher.estimate.rollout_time import RolloutEstimate, rollout_estimate
from launcher.estimate.roofline import Assumptions
from launcher.estimate.train_time import TrainEstimate, train_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEstimate:
    """Seconds of a step by phase, and the run's cost."""

    rollout: RolloutEstimate
    train: TrainEstimate
    publish: PublishEstimate
    rollout_s: float
    """Saturated if engines sample ahead."""
    step_s: float
    num_gpus: int
    num_steps: int

    @property
    def gpu_hours(self) -> float:
        """All steps on all GPUs of the nodes; evaluations, checkpoints and the start are not counted."""
        return self.step_s * self.num_steps * self.num_gpus / 3600


def step_estimate(run: PlannedRun, given: Assumptions, *, num_gpus: int) -> StepEstimate:
    """The estimate of `run` on `num_gpus` GPUs, used or not."""
    rollout, train, publish = rollout_estimate(run, given), train_estimate(run, given), publish_estimate(run, given)
    rollout_s = rollout.saturated_s if run.config.samples_ahead else rollout.seconds
    if run.config.placement.mode == "disaggregated" and run.config.samples_ahead:
        step_s = max(rollout_s + publish.load_s + publish.overhead_s, train.seconds + publish.seconds)
    else:
        step_s = rollout_s + train.seconds + publish.seconds + publish.switch_s
    return StepEstimate(
        rollout=rollout,
        train=train,
        publish=publish,
        rollout_s=rollout_s,
        step_s=step_s,
        num_gpus=num_gpus,
        num_steps=run.config.num_steps,
    )
