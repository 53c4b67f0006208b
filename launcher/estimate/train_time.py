"""Estimate of the seconds in which the trainer trains one step. Pure.

A forward does two operations for each weight and token, and attention; a backward twice as much. `trainer.recompute` =
full repeats the forward of the layers, or of some (`recompute_num_layers` of `trainer.megatron`), and selective that of
attention. The output layer always repeats its forward (`megatron_rl.model.logprobs`). FP32 products take twice as long
(TF32). With several optimizer steps, batch normalisation or means over kept tokens, `old_logprobs` take one more
forward of all samples (`megatron_rl.trainer.learner`).

A reference policy takes one forward more, and a critic what the policy takes, without logits.

Communication is not hidden behind products: sequence parallelism gathers and scatters the hidden states twice a layer
and pass, experts exchange tokens twice a layer and pass, and each optimizer step reduces gradients and, with the
distributed optimizer, gathers parameters. States that stay in host memory come and go over PCIe. A pipeline of N stages
with m micro batches waits (N - 1) / m of the time.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.roofline import Assumptions, all_reduce_bytes, attention_flops, linear_weights, output_weights
from megatron_rl.activations import recomputed_share
from megatron_rl.config import OptimizerConfig, TrainerConfig
from megatron_rl.model.spec import ModelSpec
from megatron_rl.weights.state_sizes import StateSizes, critic_state, rank_state


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEstimate:
    """One step of the trainer."""

    products_s: float
    """Forward, backward, and what is computed again."""
    communication_s: float
    """Between tensor and expert ranks."""
    pipeline_s: float
    """Waiting for other pipeline stages."""
    optimizer_s: float
    """Reducing gradients, updating and gathering parameters, over all optimizer steps."""
    num_updates: int
    """Optimizer steps."""
    tokens: float
    """Tokens of one epoch, prompts included."""

    @property
    def seconds(self) -> float:
        """The whole phase."""
        return self.products_s + self.communication_s + self.pipeline_s + self.optimizer_s


def train_estimate(run: PlannedRun, given: Assumptions) -> TrainEstimate:
    """All data-parallel ranks have the same work."""
    config, parallel = run.config, run.config.trainer.parallel
    algorithm = config.algorithm
    responses = given.lengths.of(algorithm.prompts_per_step * algorithm.group_size)
    samples = given.lengths.prompt + responses
    num_updates = algorithm.updates_per_step
    tokens = float(samples.sum())
    passes = _passes(run, num_updates)
    squares = float(np.square(samples).sum())
    work = [(run.spec, passes), *_further_work(run)]
    products_s = sum(_products_s(run, given, tokens, squares, each) for each in work)
    communication_s = sum(_communication_s(run, given, tokens, each) for each in work)
    per_rank = tokens / algorithm.num_mini_batches / parallel.data
    micro_batches = max(1.0, per_rank / max(config.trainer.max_micro_batch_tokens, float(samples.mean())))
    pipeline_s = (products_s + communication_s) * (parallel.pipeline - 1) / micro_batches
    return TrainEstimate(
        products_s=products_s,
        communication_s=communication_s,
        pipeline_s=pipeline_s,
        optimizer_s=num_updates * _update_s(run, given),
        num_updates=num_updates,
        tokens=tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """Forwards' worth of work over all samples of a step; a backward is worth two."""

    layers: float
    """Linear layers, and exchanges between ranks."""
    attention: float
    output: float


def _passes(run: PlannedRun, num_updates: int) -> _Passes:
    epochs = run.config.algorithm.num_epochs
    waits = run.config.algorithm.needs_all_logprobs or run.further.critic is not None
    old_logprobs = 1.0 if num_updates > 1 or waits else 0.0
    layers, attention = _learning(run.spec, run.config.trainer)
    return _Passes(
        layers=epochs * layers + old_logprobs,
        attention=epochs * attention + old_logprobs,
        output=epochs * 4.0 + old_logprobs,
    )


def _learning(spec: ModelSpec, trainer: TrainerConfig) -> tuple[float, float]:
    """Forwards' worth of linear layers and of attention in a forward and backward pass."""
    layers = 3.0 + recomputed_share(spec, trainer)
    return layers, 4.0 if trainer.recompute == "selective" else layers


_Work: TypeAlias = tuple[ModelSpec, _Passes]
"""A model, and how often it runs over all samples."""


def _further_work(run: PlannedRun) -> list[_Work]:
    """One forward of the reference; one of the critic, which then learns as often as the policy, without logits."""
    epochs = run.config.algorithm.num_epochs
    work = []
    if run.further.reference is not None:
        work.append((run.further.reference, _Passes(layers=1.0, attention=1.0, output=1.0)))
    if (critic := run.further.critic) is not None:
        layers, attention = _learning(critic, run.config.trainer)
        passes = _Passes(layers=epochs * layers + 1.0, attention=epochs * attention + 1.0, output=0.0)
        work.append((critic, passes))
    return work


def _products_s(run: PlannedRun, given: Assumptions, tokens: float, squares: float, work: _Work) -> float:
    """Seconds of the products of one rank, in micro batches that fill it; `squares` is the sum of squared lengths."""
    (spec, passes), trainer = work, run.config.trainer
    world = trainer.parallel.world_size
    linear = passes.layers * 2.0 * linear_weights(spec) * tokens / world
    attention = passes.attention * attention_flops(spec, squares / 2) / world
    output = passes.output * 2.0 * output_weights(spec) * tokens / world
    eight_bit = 0.0 if trainer.fp8 == "none" else 1.0
    slower = 1.0 if trainer.dtype == "bf16" else 2.0
    return given.product_s(slower * linear, eight_bit=eight_bit) + given.product_s(slower * (attention + output))


def _communication_s(run: PlannedRun, given: Assumptions, tokens: float, work: _Work) -> float:
    """Seconds of one rank's exchanges inside tensor-parallel and expert-parallel groups."""
    (spec, passes), parallel = work, run.config.trainer.parallel
    width = 2 if run.config.trainer.dtype == "bf16" else 4
    hidden = width * tokens / parallel.data * spec.hidden_size * spec.num_layers / parallel.pipeline
    tensor_s = 2 * passes.layers * all_reduce_bytes(hidden, parallel.tensor) / given.nvlink_bytes_s
    if spec.experts is None or parallel.expert == 1:
        return tensor_s
    routed = 2 * passes.layers * hidden * spec.experts.per_token / parallel.tensor
    leaving = routed * (parallel.expert - 1) / parallel.expert
    return tensor_s + leaving / given.link_bytes_s(parallel.tensor * parallel.expert)


def _update_s(run: PlannedRun, given: Assumptions) -> float:
    """Seconds of one optimizer step: gradients are summed over replicas, states read and written, parameters gathered.

    Spread experts have fewer replicas; their bytes are counted like all others.
    """
    trainer, critic = run.config.trainer, run.further.critic
    seconds = _model_update_s(rank_state(run.spec, trainer, pipeline_rank=0), trainer, trainer.optimizer, given)
    if critic is not None:
        state = critic_state(critic, trainer, pipeline_rank=0)
        seconds += _model_update_s(state, trainer, trainer.critic.optimizer, given)
    return seconds


def _model_update_s(state: StateSizes, trainer: TrainerConfig, optimizer: OptimizerConfig, given: Assumptions) -> float:
    parallel = trainer.parallel
    share = (parallel.data - 1) / parallel.data
    travels = share * (state.gradients + state.parameters if optimizer.distributed else 2 * state.gradients)
    read = 2 * state.optimizer_bytes + state.gradients + state.parameters
    moved = 2 * state.optimizer_bytes if optimizer.states_on_host else 0
    return (
        travels / given.link_bytes_s(parallel.tensor * parallel.data)
        + read / given.memory_bytes_s
        + moved / given.pcie_bytes_s
    )
