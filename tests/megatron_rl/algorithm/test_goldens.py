"""Losses, advantages, divergence and presets against values that verl 0.9.1 and slime computed (tests/data)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import BatchOutcome, GroupOutcome
from megatron_rl.algorithm.coefficients import Coefficients
from megatron_rl.algorithm.columns import Columns
from megatron_rl.algorithm.kl import divergence, loss_term
from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm.token_advantages import TokenOutcome, terminal_rewards, whitened, whitening_sums
from megatron_rl.algorithm_settings import ADVANTAGES, LOSSES
from megatron_rl.config import AlgorithmConfig, CorrectionConfig
from megatron_rl.correction_config import BYPASS_PRESETS
from tests.support.loss_inputs import choice, loss_inputs, run_loss

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "algorithms.json").read_text())
VERL, SLIME = GOLDEN["verl"], GOLDEN["slime"]
LENGTHS, GROUPS, REWARDS = GOLDEN["lengths"], GOLDEN["groups"], GOLDEN["rewards"]
MASK = np.array(GOLDEN["columns"]["mask"]) > 0
CLOSE = {"rel": 1e-6, "abs": 1e-6}


def packed(rows):
    """Response tokens of padded rows, sequence after sequence."""
    return np.array(rows)[MASK]


COLUMNS = {name: torch.tensor(packed(rows)) for name, rows in GOLDEN["columns"].items()}


def case_inputs(logprobs, *, aggregation="token_mean"):
    return loss_inputs(
        logprobs,
        COLUMNS["old"],
        COLUMNS["advantages"],
        lengths=LENGTHS,
        rollout=COLUMNS["rollout"],
        aggregation=aggregation,
        ref=COLUMNS["ref"],
    )


def label(case):
    return f"{case['loss']['name']} {case['loss'].get('divergence', '')} {case['aggregation']}"


@pytest.mark.parametrize("case", VERL["losses"], ids=label)
def test_value_and_gradient_of_a_loss_are_verls(case):
    logprobs = COLUMNS[case["logprobs"]].clone().requires_grad_()
    aggregation = case["aggregation"]
    if aggregation == "seq_mean_token_sum_norm":
        aggregation = {"name": aggregation, "constant": MASK.shape[1]}  # verl's default is the padded length
    weights = COLUMNS["weights"] if case["weighted"] else None
    result = run_loss(case["loss"], case_inputs(logprobs, aggregation=aggregation), weights=weights)
    assert result.loss.item() == pytest.approx(case["value"], **CLOSE)
    result.loss.backward()
    assert logprobs.grad.tolist() == pytest.approx(packed(case["gradient"]), **CLOSE)


def group_outcomes():
    rewards, lengths, groups = np.array(REWARDS), np.array(LENGTHS), np.array(GROUPS)
    return [
        GroupOutcome(
            rewards=rewards[groups == group],
            accuracies=rewards[groups == group],
            lengths=lengths[groups == group],
            max_response_tokens=20,
        )
        for group in sorted(set(GROUPS))
    ]


def token_outcome():
    """With k3 of every token, times 0.1, in the reward."""
    lengths = torch.tensor(LENGTHS)
    rewards = terminal_rewards(torch.tensor(REWARDS, dtype=torch.float64), lengths, len(COLUMNS["old"]))
    return TokenOutcome(
        rewards=rewards - 0.1 * divergence(COLUMNS["old"], COLUMNS["ref"], estimator="k3"),
        old_logprobs=COLUMNS["old"],
        rollout_logprobs=COLUMNS["rollout"],
        loss_mask=torch.ones(len(COLUMNS["old"]), dtype=torch.bool),
        lengths=lengths,
        further=Columns(tensors={"values": COLUMNS["values"]}),
    )


@pytest.mark.parametrize("case", VERL["advantages"], ids=lambda case: str(case["advantage"]))
def test_an_advantage_is_verls(case):
    loaded = load_stage(ADVANTAGES, choice(advantage=case["advantage"]))
    if loaded.inputs is TokenOutcome:
        outcome = token_outcome()
        result = loaded.function(outcome)
        sums = whitening_sums(result.advantages, outcome.loss_mask)
        assert result.returns.tolist() == pytest.approx(packed(case["returns"]), **CLOSE)
        assert whitened(result.advantages, sums).tolist() == pytest.approx(packed(case["values"]), **CLOSE)
        return
    groups = group_outcomes()
    if loaded.inputs is BatchOutcome:
        values = loaded.function(BatchOutcome(groups=tuple(groups)))
    else:
        values = np.concatenate([loaded.function(group) for group in groups])
    assert np.repeat(values, LENGTHS) == pytest.approx(packed(case["values"]), **CLOSE)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_of_a_token_is_verls(estimator):
    values = divergence(COLUMNS["new"], COLUMNS["ref"], estimator=estimator)
    assert values.tolist() == pytest.approx(packed(VERL["kl"][estimator]), **CLOSE)


def test_an_adaptive_coefficient_of_the_divergence_follows_verls():
    algorithm = AlgorithmConfig(kl={"place": "loss", "coefficient": 0.01, "target": 0.1, "horizon": 1000})
    coefficients = Coefficients.first(algorithm)
    for step in VERL["controller"]:
        coefficients = coefficients.next(algorithm, kl=step["kl"], entropy=None, num_responses=step["responses"])
        assert coefficients.kl == pytest.approx(step["coefficient"], rel=1e-9)


@pytest.mark.parametrize("name", VERL["presets"])
def test_a_preset_of_the_correction_is_verls(name):
    theirs = VERL["presets"][name]
    ours = CorrectionConfig.model_validate_json(json.dumps({"preset": name}), strict=True)
    lower, _, cap = str(theirs["rollout_is_threshold"]).rpartition("_")
    kind_of_weight = "icepop" if lower else theirs["rollout_is"]
    modes = {None: "none", "token": "tis_token", "sequence": "tis_sequence", "icepop": "icepop"}
    assert ours.mode == modes[kind_of_weight]
    if theirs["rollout_is"]:
        assert (ours.cap, ours.low) == (float(cap), float(lower or 0.5))
    low, _, high = str(theirs["rollout_rs_threshold"]).rpartition("_")
    rules = [(theirs["rollout_rs"], float(low or 0.0), float(high))] if theirs["rollout_rs"] else []
    assert [(rule.statistic, rule.low, rule.high) for rule in ours.rejections] == rules
    kind = {"reinforce": "pg", "ppo_clip": "clip"}[theirs["loss_type"]] if theirs["bypass_mode"] else None
    assert BYPASS_PRESETS.get(name) == kind


def token_losses(loss, logprobs):
    return load_stage(LOSSES, choice(loss=loss)).function(case_inputs(logprobs)).losses.tolist()


def test_losses_of_tokens_are_slimes():
    clip = {"name": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert token_losses(clip, COLUMNS["new"]) == pytest.approx(packed(SLIME["clipped"]), **CLOSE)
    cispo = {"name": "cispo", "clip_low": 1.0, "clip_high": 0.3}
    assert token_losses(cispo, COLUMNS["new"]) == pytest.approx(packed(SLIME["cispo"]), **CLOSE)
    assert token_losses("gspo", COLUMNS["near"]) == pytest.approx(SLIME["gspo"], **CLOSE)


def test_the_unbiased_divergence_is_slimes():
    values = loss_term(case_inputs(COLUMNS["new"]), estimator="k3_unbiased")
    assert values.tolist() == pytest.approx(packed(SLIME["k3_unbiased"]), **CLOSE)


def test_the_estimated_advantages_of_a_critic_are_slimes():
    settings = choice(advantage={"name": "gae", "gamma": 0.97, "lam": 0.9})
    result = load_stage(ADVANTAGES, settings).function(token_outcome())
    assert result.advantages.tolist() == pytest.approx([value for row in SLIME["gae"] for value in row], **CLOSE)
    assert result.returns.tolist() == pytest.approx([value for row in SLIME["gae_returns"] for value in row], **CLOSE)
