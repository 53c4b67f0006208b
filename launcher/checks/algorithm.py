"""Combinations of stages of the algorithm that have no meaning, and functions of one's own that cannot be loaded."""

import json
import subprocess
import sys

from launcher.checks.functions import function_problems
from launcher.checks.further_models import further_problems
from launcher.config.schema import RunConfig
from megatron_rl.algorithm_config import AlgorithmConfig, KlConfig
from megatron_rl.algorithm_settings import (
    AGGREGATIONS,
    LOSSES,
    Accuracy,
    AdvantageChoice,
    Bypass,
    Clipped,
    DrGrpo,
    LossChoice,
    Overlong,
    Reinforce,
    ReinforcePlusPlus,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    Unshaped,
    ZeroVariance,
)
from megatron_rl.correction_config import BYPASS_PRESETS, CorrectionConfig, RejectionConfig, preset_keys
from megatron_rl.stages import Column, PlugIn

PLUG_IN_CHECK = ("-m", "megatron_rl.algorithm.plug_in_check")
PLUG_IN_TIMEOUT_S = 600.0
"""Deadline of importing functions of one's own."""


def algorithm_problems(config: RunConfig) -> list[str]:
    """One sentence for each combination that cannot run, and for each function that cannot be loaded."""
    algorithm = config.algorithm
    problems = _advantage(algorithm) + _loss(algorithm) + _correction(algorithm) + _terms(algorithm)
    problems += _shaping(algorithm, config.sampling.max_response_tokens)
    own_problems, own_needs = _plug_ins(algorithm)
    return problems + own_problems + further_problems(config, algorithm.needs.union(*own_needs.values()))


def algorithm_warnings(algorithm: AlgorithmConfig) -> list[str]:
    """Combinations that run, and rarely do what their user wants."""
    judge, shaping, warnings = algorithm.filter, algorithm.reward_shaping, []
    if algorithm.max_refill and isinstance(judge, ZeroVariance) and not isinstance(shaping, Unshaped):
        warnings.append(
            f"`algorithm.max_refill` = {algorithm.max_refill:g} with `algorithm.filter` = zero_variance and "
            f"`algorithm.reward_shaping` = {shaping.name}: the filter judges shaped rewards, so groups that are all "
            "right or all wrong may stay; set filter to accuracy, as DAPO does"
        )
    if algorithm.group_size < 2 and isinstance(judge, Accuracy) and judge.low >= 0 and judge.high <= 1:
        warnings.append(
            f"`algorithm.group_size` = {algorithm.group_size} with `algorithm.filter` = accuracy: the mean accuracy of "
            "a group of one is that of its response, so every response with the accuracy 0 or 1 is dropped; set filter "
            "to none, unless the reward function grades between the two"
        )
    return warnings


def _advantage(algorithm: AlgorithmConfig) -> list[str]:
    advantage, problems = algorithm.advantage, []
    if not isinstance(advantage, AdvantageChoice):
        return []
    of_group = not advantage.on_trainer and not isinstance(advantage, ReinforcePlusPlus)
    if of_group and algorithm.group_size < 2:
        problems.append(
            f"`algorithm.group_size` = {algorithm.group_size} with `algorithm.advantage` = {advantage.name}: "
            "the advantage compares the responses of a group; set group_size to 2 or more"
        )
    if advantage.on_trainer and isinstance(algorithm.filter, ZeroVariance):
        problems.append(_drops_equal_rewards(advantage, algorithm.group_size))
    if isinstance(advantage, DrGrpo) and not isinstance(algorithm.aggregation, SeqMeanTokenSum | SeqMeanTokenSumNorm):
        problems.append(
            f"`algorithm.advantage` = dr_grpo with `algorithm.aggregation` = {algorithm.aggregation.name}: Dr. GRPO "
            "divides the loss by no length; set aggregation to seq_mean_token_sum_norm (the paper's) or "
            "seq_mean_token_sum"
        )
    return problems


def _drops_equal_rewards(advantage: AdvantageChoice, group_size: int) -> str:
    """The problem of `zero_variance` with an advantage that the trainer computes."""
    pair = f"`algorithm.advantage` = {advantage.name} and `algorithm.filter` = zero_variance"
    if group_size < 2:
        return (
            f"`algorithm.group_size` = {group_size} with {pair}: the rewards of a group of one are always equal, so "
            "every group would be dropped; set filter to none"
        )
    return (
        f"{pair}: the filter would drop groups of equal rewards, and this advantage compares them with a critic or "
        "with other groups; set filter to none, or to accuracy to drop groups that are all right or all wrong"
    )


def _shaping(algorithm: AlgorithmConfig, most_tokens: int) -> list[str]:
    shaping = algorithm.reward_shaping
    if not isinstance(shaping, Overlong) or shaping.buffer_tokens <= most_tokens:
        return []
    return [
        f"`algorithm.reward_shaping.buffer_tokens` = {shaping.buffer_tokens} with `sampling.max_response_tokens` = "
        f"{most_tokens}: the buffer is the last part of the longest response, and this one would punish every response "
        "for its length; lower buffer_tokens (DAPO: a fifth of the longest response)"
    ]


def _loss(algorithm: AlgorithmConfig) -> list[str]:
    loss, aggregation, problems = algorithm.loss, algorithm.aggregation.name, []
    if isinstance(loss, LossChoice) and loss.aggregation and loss.aggregation != aggregation:
        problems.append(
            f"`{LOSSES.key}` = {loss.name} with `{AGGREGATIONS.key}` = {aggregation}: its ratio belongs to a "
            f"whole sequence, and each sequence counts once; set aggregation to {loss.aggregation}"
        )
    if isinstance(loss, Bypass) and algorithm.correction.mode != "none":
        problems.append(
            f"`{LOSSES.key}` = bypass with `algorithm.correction.mode` = {algorithm.correction.mode}: the loss takes "
            "the sampler's log-probabilities as the old ones, so its ratio already corrects; set mode to none"
        )
    if isinstance(loss, Clipped) and 0 < loss.dual_clip <= 1:
        problems.append(
            f"`{LOSSES.key}.dual_clip` = {loss.dual_clip}: the loss of a token with a negative advantage would be cut "
            "at or below its value before the update, so the token would have no gradient; set dual_clip above 1 (3 is "
            "common), or to 0"
        )
    return problems


def _correction(algorithm: AlgorithmConfig) -> list[str]:
    correction = algorithm.correction
    problems = _bounds(correction) + _preset(correction) + _rejections(correction)
    losses: dict[str, type[LossChoice]] = {"clip": Bypass, "pg": Reinforce}
    wanted = losses.get(BYPASS_PRESETS.get(correction.preset, ""))
    if wanted is not None and not isinstance(algorithm.loss, wanted):
        name = wanted.model_fields["name"].default
        problems.append(
            f"`algorithm.correction.preset` = {correction.preset} with `{LOSSES.key}` = {algorithm.loss.name}: the "
            f"preset is made for another loss; set loss to {name}"
        )
    return problems


def _bounds(correction: CorrectionConfig) -> list[str]:
    """Bounds of the mode that leave tokens out, or scale the loss, although trainer and sampler agree."""
    mode, low, cap = correction.mode, correction.low, correction.cap
    if correction.has_band and low >= cap:
        return [
            f"`algorithm.correction.low` = {low} is not below `algorithm.correction.cap` = {cap}: mode {mode} keeps "
            "weights between the two, here none; lower low"
        ]
    if correction.has_band and not low <= 1 <= cap:
        return [
            f"`algorithm.correction.low` = {low:g} with `algorithm.correction.cap` = {cap:g}: mode {mode} keeps ratios "
            "between the two, without the ratio 1 of equal log-probabilities; set cap above 1 and low below 1"
        ]
    if mode != "none" and cap < 1:
        return [
            f"`algorithm.correction.cap` = {cap:g}: mode {mode} truncates larger ratios, and the ratio of equal "
            "log-probabilities is 1, so the whole loss would be scaled; set cap above 1 (2 is common)"
        ]
    return []


def _preset(correction: CorrectionConfig) -> list[str]:
    """Keys with another value than the preset gives them: what is computed would not be what the preset names."""
    meant, default = CorrectionConfig(preset=correction.preset), CorrectionConfig()
    sets, values = preset_keys(correction.preset), dict(correction)
    spelled = ", ".join(
        f"{key}: {_shown(value)}"
        for key, value in values.items()
        if key != "preset" and (key in sets or value != getattr(default, key))
    )
    return [
        f"`algorithm.correction.preset` = {correction.preset} with `algorithm.correction.{key}` = "
        f"{_shown(values[key])}: the preset sets {_shown(getattr(meant, key))}; set "
        f"`algorithm.correction={{preset: {correction.preset}}}` to have the preset alone, or "
        f"`algorithm.correction={{{spelled}}}` to keep these values"
        for key in sets
        if values[key] != getattr(meant, key)
    ]


def _shown(value: str | float | tuple[RejectionConfig, ...]) -> str:
    """A value of a correction as it is written in a configuration."""
    if not isinstance(value, tuple):
        return str(value)
    rules = (", ".join(f"{name}: {bound}" for name, bound in rule if bound) for rule in value)
    return f"[{', '.join(f'{{{rule}}}' for rule in rules)}]"


def _rejections(correction: CorrectionConfig) -> list[str]:
    """Bounds that leave tokens out although trainer and sampler agree, and bounds without effect."""
    problems = []
    for number, rule in enumerate(correction.rejections):
        key, low = f"algorithm.correction.rejections[{number}]", rule.low or 1 / rule.high
        if not rule.statistic.endswith("k1"):
            if rule.low:
                problems.append(
                    f"`{key}.low` = {rule.low:g}: {rule.statistic} is 0 for equal log-probabilities and has no lower "
                    "bound, so the key has no effect; leave it out, or set statistic to one of k1"
                )
        elif not low <= 1 <= rule.high:
            problems.append(
                f"`{key}`: {rule.statistic} keeps ratios from {low:g} to {rule.high:g}, without the ratio 1 of equal "
                "log-probabilities; set high above 1 and low below 1"
            )
    if correction.veto_ratio >= 1:
        problems.append(
            f"`algorithm.correction.veto_ratio` = {correction.veto_ratio:g}: sequences with a token of a lower ratio "
            "are rejected, and the ratio of equal log-probabilities is 1; set it far below 1 (1e-4 is common), or to 0"
        )
    return problems


def _terms(algorithm: AlgorithmConfig) -> list[str]:
    kl, entropy, problems = algorithm.kl, algorithm.entropy, []
    on_trainer = getattr(algorithm.advantage, "on_trainer", True)  # of a function of one's own, only itself knows
    if kl.place == "reward" and not on_trainer:
        problems.append(
            f"`algorithm.kl.place` = reward with `algorithm.advantage` = {algorithm.advantage.name}: this advantage is "
            "computed before the reference policy has scored a token; choose discounted_returns or gae, or set place "
            "to loss"
        )
    if kl.place == "reward" and kl.estimator == "k3_unbiased":
        problems.append(
            "`algorithm.kl.place` = reward with `algorithm.kl.estimator` = k3_unbiased: the probability ratio of the "
            "old policy is 1; set estimator to k3"
        )
    if kl.place == "none" and "place" not in kl.model_fields_set and kl != KlConfig():  # else it is off on purpose
        key = next(name for name in KlConfig.model_fields if getattr(kl, name) != getattr(KlConfig(), name))
        problems.append(
            f"`algorithm.kl.{key}` = {getattr(kl, key)} with `algorithm.kl.place` = none: no divergence is computed, "
            "so the key has no effect; set `algorithm.kl.place` to loss or reward, or leave algorithm.kl out "
            "(`algorithm.kl={}`)"
        )
    if kl.place != "none" and kl.target and not kl.coefficient:
        problems.append(
            f"`algorithm.kl.coefficient` = 0 with `algorithm.kl.target` = {kl.target:g}: the coefficient adapts by "
            "factors, so it would stay 0; set it above 0 (0.001 is the default), or target to 0"
        )
    if entropy.target and entropy.coefficient > entropy.max_coefficient:
        problems.append(
            f"`algorithm.entropy.coefficient` = {entropy.coefficient} is above `algorithm.entropy.max_coefficient` = "
            f"{entropy.max_coefficient}; lower it"
        )
    return problems


def _plug_ins(algorithm: AlgorithmConfig) -> tuple[list[str], dict[str, frozenset[Column]]]:
    """Problems of functions of one's own, and the columns that they need by the key of their stage."""
    own = {key: choice.name for key, choice in algorithm.stages.items() if isinstance(choice, PlugIn)}
    if not own:
        return [], {}
    if problems := function_problems(own):
        return problems, {}
    done = subprocess.run(
        [sys.executable, *PLUG_IN_CHECK],
        input=algorithm.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=PLUG_IN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [f"functions of `algorithm` ({', '.join(own.values())}) could not be imported: {last}"], {}
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return list(found["problems"]), {key: frozenset(columns) for key, columns in found["needs"].items()}
