"""The registry and the sources of all producers agree in both directions."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import torch

from history.drafting.stats import SOURCES
from launcher.metrics.registry import METRICS, find, sections
from launcher.run_dir.step_timeline import BETWEEN_STEPS, StepTimeline
from megatron_rl.algorithm.correction import PackedLogprobs
from megatron_rl.algorithm.mismatch import MismatchSums, SumsByAge
from megatron_rl.algorithm.mismatch_parts import PartSums, SampledTokens
from megatron_rl.batching.batch import BatchCounts
from megatron_rl.config import CorrectionConfig, RejectionConfig
from megatron_rl.controller.step_metrics import _rewards
from rollout.evaluation import EvaluationRow
from rollout.tracing.timeline import Part
from tests.support.runs.synthetic_run import ORIGIN_S
from tests.support.scored_groups import scored_group

ROOT = Path(__file__).resolve().parents[3]
PREFIXES = ("reward", "response_length", "prompt_length", "batch", "actor", "sft", "publish", "engine", "planner")
PREFIXES += ("trainer", "history", "perf", "timing_s", "timeline", "rollout_corr", "cluster", "checkpoint")
PREFIXES += ("refill", "guard", "critic")
NAME = re.compile(rf"({'|'.join(PREFIXES)})/[a-z0-9_{{}}/]+")
NOT_NAMES = re.compile(r"\{\}$|/\{\}_|[/_]$")
"""Literals whose end is computed; the tests below compute them."""
READERS = ("launcher/report", "launcher/metrics", "launcher/run_dir/console.py", "launcher/run_dir/status.py")


def literals() -> Iterator[str]:
    """Metric names in the sources of producers; `{}` stands for a computed part."""
    for package in ("history", "rollout", "megatron_rl", "launcher"):
        for path in (ROOT / package).rglob("*.py"):
            if path.relative_to(ROOT).as_posix().startswith(READERS):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = _text(node)
                if text is not None and NAME.fullmatch(text) and not (ROOT / text).exists():
                    yield text


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def mismatch_names() -> set[str]:
    """Names of every mode and every rejection, computed by the product from three tokens."""
    logprobs = PackedLogprobs(
        old_logprobs=torch.tensor([-1.0, -2.0, -0.5]),
        rollout_logprobs=torch.tensor([-1.1, -1.9, -0.5]),
        lengths=torch.tensor([2, 1]),
    )
    names: set[str] = set()
    rules = tuple(
        RejectionConfig(statistic=statistic, high=2.0)
        for statistic in get_args(RejectionConfig.model_fields["statistic"].annotation)
    )
    for mode in get_args(CorrectionConfig.model_fields["mode"].annotation):
        for batch_normalize in (False, True):
            config = CorrectionConfig(mode=mode).model_copy(
                update={"batch_normalize": batch_normalize, "veto_ratio": 1e-4, "rejections": rules}
            )
            names |= set(MismatchSums.of(logprobs, config=config).finalize())
    ages = SumsByAge.empty(1)
    ages.add(logprobs, torch.ones(3), torch.tensor([0, 1]))
    parts = PartSums.empty(1)
    parts.add(
        SampledTokens(
            old_logprobs=logprobs.old_logprobs,
            code_logprobs=logprobs.old_logprobs,
            rollout_logprobs=logprobs.rollout_logprobs,
            ages=torch.tensor([0, 0, 1]),
            resampled=torch.tensor([False, True, False]),
        )
    )
    return names | set(ages.metrics()) | set(parts.metrics())


def computed() -> set[str]:
    """Names with a computed part."""
    names = {f"batch/{field.name}" for field in fields(BatchCounts)}
    names |= {f"timeline/{part.value}_share" for part in Part if part is not Part.SATURATED}
    names |= {f"history/accepted_share/{source}" for source in SOURCES} | {"publish/sqnr_db/layer_0"}
    group = scored_group(0, num_samples=1)
    score = replace(group.scores[0], details=(("parsed", 1.0),))
    names |= {name for name in _rewards([replace(group, scores=(score,))]) if name.endswith("parsed")}
    # phases of `megatron_rl.controller.phases`; evaluations and checkpoints always follow the row of their step
    names |= {f"timing_s/{phase}" for phase in ("step", "suspended", *span_activities() - {"evaluate", "checkpoint"})}
    timeline = StepTimeline(1)
    for number, activity in enumerate(BETWEEN_STEPS):
        timeline.add_span("trainer", activity, ORIGIN_S + number, ORIGIN_S + number + 1)
    names |= {name for name in timeline.close(ORIGIN_S + 9, 1.0) if name.startswith("timing_s/")}
    return names | mismatch_names() | evaluation_names()


def evaluation_names() -> set[str]:
    """Names of a whole set and of one of its sources."""
    row = EvaluationRow(
        set_name="aime",
        data_source="all",
        format="int8",
        step=0,
        num_prompts=1,
        samples_per_prompt=8,
        average=0.5,
        passed=1.0,
        truncated=0.0,
        mean_length=9.0,
    )
    return {*row.metrics(), *replace(row, data_source="math").metrics()}


def span_activities() -> set[str]:
    """Second arguments of `clock.phase(actor, activity)`."""
    tree = ast.parse((ROOT / "megatron_rl" / "controller" / "phases.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    named = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "phase"]
    return {str(argument.value) for call in named if isinstance(argument := call.args[1], ast.Constant)}


def test_every_metric_that_a_producer_writes_is_listed() -> None:
    written = {text for text in literals() if not NOT_NAMES.search(text)} | computed()
    assert len(written) > 150
    assert sorted(name for name in written if find(name.replace("{}", "0")) is None) == []


def test_every_listed_metric_is_written() -> None:
    written = {text.replace("{}", "0") for text in literals() if not NOT_NAMES.search(text)} | computed()
    assert [metric.name for metric in METRICS if not any(metric.matches(name) for name in written)] == []


def test_no_metric_is_listed_twice_and_all_have_a_unit_a_reduction_and_a_sentence() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.unit and metric.reduction and metric.meaning.endswith("."), metric.name
    assert sum(len(of_section) for _, of_section in sections()) == len(METRICS)


def test_a_pattern_fits_one_part_of_a_name_only() -> None:
    layer = find("publish/sqnr_db/layer_12")
    assert layer is not None and layer.name == "publish/sqnr_db/layer_{layer}"
    assert find("publish/sqnr_db/layer_1/x") is None
    exact = find("rollout_corr/rollout_rs_seq_masked_fraction")
    assert exact is not None and exact.name == "rollout_corr/rollout_rs_seq_masked_fraction"
    assert find("my_loss/term") is None
