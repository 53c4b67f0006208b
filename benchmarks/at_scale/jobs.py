"""The planned runs: a recipe on a number of GPUs, the speed of one engine, and the seconds of a training phase.

All speeds come from the roofline of `megatron-rl plan` (`launcher.estimate`). Its shares of peaks are assumed, unless
results of `launcher.first_hour` are given.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.planner.simulator.engines import Speed
from benchmarks.planner.simulator.speeds import drafting
from examples.recipes.plans import load_recipe, options
from launcher.checks.fit import fit
from launcher.commands.plan import PlanOptions, assumptions, planned_nodes
from launcher.estimate.lengths import Floats, Lengths
from launcher.estimate.planned_run import PlannedRun
from launcher.estimate.publish_time import publish_estimate
from launcher.estimate.rollout_time import forward_s
from launcher.estimate.roofline import Assumptions
from launcher.estimate.train_time import train_estimate
from launcher.first_hour.shares import Shares
from megatron_rl.memory import kv_bytes_per_token, weight_bytes
from megatron_rl.model.spec import read_model_spec
from rollout.weights.format import WeightFormat

Precision = Literal["BF16", "8 bits"]
PROMPT_TOKENS = 512.0
GPUS_PER_NODE = 8
KV_SHARE = 0.85
"""Share of a device for engine weights, keys and values; activations and CUDA graphs take the rest."""
MOST_SLOTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A recipe that is scaled over GPUs."""

    recipe: str
    eight_bit: str
    """Format of 8-bit engines."""
    gpus_of_replica: int
    """GPUs of a replica of the trainer."""


MODELS: Mapping[str, Model] = {
    "Qwen2.5-32B": Model(recipe="dapo-qwen2.5-32b-16n8g", eight_bit="fp8_channel", gpus_of_replica=16),
    "Qwen3-30B-A3B": Model(recipe="grpo-qwen3-30b-a3b-fp8-4n8g", eight_bit="fp8_block", gpus_of_replica=1),
}
BATCH = ("algorithm.prompts_per_step=512", "algorithm.group_size=16", "algorithm.num_mini_batches=16")
"""Of DAPO, for both models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run on a number of GPUs, all of which the trainer and the engines use in turns."""

    run: PlannedRun
    given: Assumptions
    num_gpus: int

    @property
    def num_slots(self) -> int:
        """Responses that an engine runs at a time: what its keys and values allow at the mean length."""
        engine, lengths = self.run.config.engine, self.given.lengths
        weights = weight_bytes(self.run.spec, WeightFormat.of(engine)) / engine.tensor_parallel
        free = KV_SHARE * self.given.gpu.memory_bytes - weights
        tokens = free / kv_bytes_per_token(self.run.spec, engine.tensor_parallel, engine.kv_format)
        return max(1, min(MOST_SLOTS, int(tokens / (lengths.prompt + lengths.response))))

    def speed(self, drafter: str) -> Speed:
        """Of one engine; `drafter` is `none` or a key of `speeds.DRAFTERS`.

        Nothing is drafted at numbers of responses where drafts cost more than they save. All drafters have this rule.
        """
        rows = np.maximum(np.arange(self.num_slots + 1), 1)
        plain = np.asarray([self._forward_s(int(number), 0.0) for number in rows])
        gains, drafts = drafting(self.num_slots, drafter)
        drafted = np.asarray([self._forward_s(int(n), float(d)) for n, d in zip(rows, drafts, strict=True)])
        pays = gains / drafted > 1.0 / plain
        engine = self.run.config.engine
        kv_bytes = kv_bytes_per_token(self.run.spec, engine.tensor_parallel, engine.kv_format)
        return Speed(
            fixed_s=np.where(pays, drafted, plain),
            context_s=kv_bytes / self.given.memory_bytes_s,
            gains=np.where(pays, gains, 1.0),
        )

    def _forward_s(self, rows: int, drafts: float) -> float:
        """Without responses of the context, whose seconds `Speed.context_s` adds; prompts are part of it."""
        seconds, _ = forward_s(self.run, replace(self.given, verified_tokens=1 + drafts), rows, PROMPT_TOKENS)
        return seconds

    @property
    def train_s(self) -> float:
        """Seconds of a training phase on all GPUs."""
        return train_estimate(self.run, self.given).seconds

    def publish_s(self, *, in_turns: bool) -> float:
        """Seconds of a publish, with the switches of devices that trainer and engines share."""
        estimate = publish_estimate(self.run, self.given)
        return estimate.seconds + (estimate.switch_s if in_turns else 0.0)


def lengths_of(responses: Floats) -> Lengths:
    """The drawn lengths as an input of the estimates."""
    return Lengths(prompt=PROMPT_TOKENS, responses=np.sort(responses.ravel()), tokens_per_forward=1.0, source="drawn")


@cache
def _placed(model: str, num_gpus: int, precision: Precision) -> tuple[PlannedRun, PlanOptions]:
    chosen = MODELS[model]
    given = replace(options(), nodes=num_gpus // GPUS_PER_NODE, gpus_per_node=GPUS_PER_NODE)
    config = load_recipe(
        chosen.recipe,
        *BATCH,
        f"engine.format={'bf16' if precision == 'BF16' else chosen.eight_bit}",
        f"engine.num_engines={num_gpus // 2}",
        f"trainer.parallel.data={num_gpus // chosen.gpus_of_replica}",
        f"cluster.slurm.nodes={num_gpus // GPUS_PER_NODE}",
        "sampling.max_response_tokens=20480",
    )
    spec = read_model_spec(Path(config.model))
    fitted = fit(config, spec, planned_nodes(config, given), [])
    assert fitted is not None, f"{model} cannot be placed on {num_gpus} GPUs"
    return PlannedRun(config=config, spec=spec, placement=fitted.placement, further=fitted.further), given


def job(model: str, num_gpus: int, precision: Precision, responses: Floats, measured: Shares | None = None) -> Job:
    """A run whose responses have these lengths; `measured` replaces the assumed shares of peaks."""
    run, given = _placed(model, num_gpus, precision)
    assumed = replace(assumptions(run.config, given, GPUS_PER_NODE), lengths=lengths_of(responses))
    if measured is not None:
        overhead_s = assumed.forward_overhead_s if measured.forward_overhead_s is None else measured.forward_overhead_s
        assumed = replace(
            assumed,
            product_share=measured.product_share,
            bandwidth_share=measured.bandwidth_share,
            forward_overhead_s=overhead_s,
        )
    return Job(run=run, given=assumed, num_gpus=num_gpus)
