"""Published steps of other systems beside the estimate of the same step: how far the roofline can be trusted.

The estimate is that of `megatron-rl plan` with its default shares of peaks, or with measured ones. Nothing was fitted
to these figures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness.record import Row
from examples.recipes.plans import load_recipe, options
from launcher.commands.plan import PlanOptions, planned
from launcher.estimate.step_time import StepEstimate
from launcher.first_hour.shares import Shares

NEMO_RL = "NeMo-RL 0.4, docs/about/performance-summary.md, GRPO on H100, BF16"
PROMPT_TOKENS = 100.0
"""Of OpenMathInstruct-2, assumed; the published lengths count prompt and response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A step as published."""

    name: str
    source: str
    seconds: float
    recipe: str
    overrides: Sequence[str]
    mean_tokens: float
    """Of a prompt with its response."""
    one_step_off: bool = False
    """Trainer and engines work side by side, each on the GPUs of the estimate."""


_COMMON = (
    *("algorithm.prompts_per_step=64", "algorithm.group_size=32", "algorithm.num_mini_batches=4"),
    *("data.max_prompt_tokens=128", "sampling.max_response_tokens=3968"),
    *("engine.format=bf16", "engine.tensor_parallel=4", "engine.num_engines=8", "engine.max_num_seqs=256"),
)
_DENSE = (
    *_COMMON,
    *("trainer.parallel.tensor=4", "trainer.parallel.pipeline=4", "trainer.parallel.data=2"),
)
_SPARSE = (
    *_COMMON,
    *("trainer.parallel.tensor=2", "trainer.parallel.data=16", "trainer.parallel.expert=8"),
)
PUBLISHED = (
    Published(
        name="Qwen3-32B, on policy, 32 GPUs",
        source=NEMO_RL,
        seconds=393.0,
        recipe="grpo-qwen3-32b-4n8g",
        overrides=_DENSE,
        mean_tokens=3206.0,
    ),
    Published(
        name="Qwen3-32B, one step off, 32 + 32 GPUs",
        source=NEMO_RL,
        seconds=215.0,
        recipe="grpo-qwen3-32b-4n8g",
        overrides=_DENSE,
        mean_tokens=3207.0,
        one_step_off=True,
    ),
    Published(
        name="Qwen3-30B-A3B, on policy, 32 GPUs",
        source=NEMO_RL,
        seconds=225.0,
        recipe="grpo-qwen3-30b-a3b-fp8-4n8g",
        overrides=_SPARSE,
        mean_tokens=3154.0,
    ),
)
FLASHRL = "FlashRL, report of August 2025: rollout of 32B in INT8 over BF16"
FLASHRL_SPEEDUP = 1.75


def rows(measured: Shares | None = None) -> Iterator[Row]:
    """A row for each published figure."""
    for each in PUBLISHED:
        found = _estimate(each, measured)
        seconds = max(found.rollout_s, found.train.seconds) if each.one_step_off else found.step_s
        yield _row(each.name, each.source, each.seconds, float(seconds), "s") | {
            "rollout_s": round(float(found.rollout_s), 1),
            "train_s": round(float(found.train.seconds), 1),
        }
    yield _row("INT8 over BF16 in a rollout of 32B", FLASHRL, FLASHRL_SPEEDUP, _int8_speedup(measured), "times")


def _row(name: str, source: str, published: float, estimated: float, unit: str) -> dict[str, str | int | float | bool]:
    return {
        "what": "published",
        "case": name,
        "source": source,
        "published": published,
        "estimated": round(estimated, 2),
        "unit": unit,
        "estimated_over_published": round(estimated / published, 3),
    }


def _estimate(step: Published, measured: Shares | None) -> StepEstimate:
    given = _given(measured)
    given = replace(given, prompt_tokens=PROMPT_TOKENS, response_tokens=step.mean_tokens - PROMPT_TOKENS)
    _, estimate, _ = planned(load_recipe(step.recipe, *step.overrides), given)
    assert estimate is not None, f"{step.recipe} cannot be placed"
    return estimate


def _int8_speedup(measured: Shares | None) -> float:
    """Seconds of one rollout in BF16 over those in INT8: DAPO-32B, engines of two devices."""
    seconds = []
    for format in ("bf16", "int8"):
        config = load_recipe("dapo-qwen2.5-32b-16n8g", f"engine.format={format}")
        _, estimate, _ = planned(config, _given(measured))
        assert estimate is not None
        seconds.append(estimate.rollout.saturated_s)
    return float(seconds[0] / seconds[1])


def _given(measured: Shares | None) -> PlanOptions:
    given = options()
    if measured is None:
        return given
    return replace(given, product_share=measured.product_share, bandwidth_share=measured.bandwidth_share)
