"""Correction weights, hard trust regions and mismatch metrics against verl 0.9.1's values (tests/data)."""

import json
import math
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm.correction import (
    PackedLogprobs,
    correction_weights,
    counted_tokens,
    final_weights,
    kept_by_rule,
    kept_tokens,
    normalization_sums,
    normalize,
)
from megatron_rl.algorithm.mismatch import MismatchSums
from megatron_rl.config import CorrectionConfig, RejectionConfig

ORACLE = json.loads((Path(__file__).parents[2] / "data" / "rollout_correction.json").read_text())
CASES = {case["name"]: case for case in ORACLE["cases"]}
WEIGHT_CASES = [(name, i) for name, case in CASES.items() for i in range(len(case["is_"]))]
REJECTION_CASES = [(name, i) for name, case in CASES.items() for i in range(len(case["rs"]))]


def unpad(rows, mask):
    return [
        [value for value, used in zip(row, used_row, strict=True) if used]
        for row, used_row in zip(rows, mask, strict=True)
    ]


def packed(sequences_old, sequences_rollout):
    return PackedLogprobs(
        old_logprobs=torch.tensor([v for row in sequences_old for v in row], dtype=torch.float32),
        rollout_logprobs=torch.tensor([v for row in sequences_rollout for v in row], dtype=torch.float32),
        lengths=torch.tensor([len(row) for row in sequences_old], dtype=torch.int64),
    )


def packed_case(name):
    case = CASES[name]
    return packed(unpad(case["old"], case["mask"]), unpad(case["roll"], case["mask"]))


def flat(name, rows):
    return torch.tensor([v for row in unpad(rows, CASES[name]["mask"]) for v in row], dtype=torch.float32)


def weight_config(entry):
    low, _, cap = str(entry["threshold"]).rpartition("_")
    sequence = entry["rollout_is"] == "sequence"
    banded = {True: "icepop_sequence", False: "icepop"}[sequence]
    capped = {True: "tis_sequence", False: "tis_token"}[sequence]
    return CorrectionConfig(
        mode=banded if low else capped,
        cap=float(cap),
        low=float(low or 0.0),
        batch_normalize=entry["batch_normalize"],
    )


def rejection_rules(entry):
    statistics = entry["rollout_rs"].split(",")
    thresholds = str(entry["threshold"]).split(",")
    bounds = [threshold.rpartition("_") for threshold in thresholds]
    return tuple(
        RejectionConfig(statistic=statistic, low=float(low or 0.0), high=float(high))
        for statistic, (low, _, high) in zip(statistics, bounds, strict=True)
    )


def check_metrics(computed, expected):
    for key, value in expected.items():
        # verl takes variances as differences of float32 means: their roots are good to four digits.
        tolerance = 2e-4 if key.endswith("std") else 2e-5
        assert computed[f"rollout_corr/{key}"] == pytest.approx(value, rel=tolerance, abs=1e-6), key


@pytest.mark.parametrize(("name", "index"), WEIGHT_CASES)
def test_weights_and_their_metrics_equal_the_golden_vectors(name, index):
    entry, logprobs = CASES[name]["is_"][index], packed_case(name)
    config = weight_config(entry)
    weights = correction_weights(logprobs, config=config)
    if config.batch_normalize:
        weights = normalize(weights, normalization_sums(weights, logprobs.lengths, config=config))
    torch.testing.assert_close(weights, flat(name, entry["weights"]), rtol=2e-6, atol=1e-6)
    check_metrics(MismatchSums.of(logprobs, config=config).finalize(), entry["metrics"])


@pytest.mark.parametrize(("name", "index"), REJECTION_CASES)
def test_rejections_and_their_metrics_equal_the_golden_vectors(name, index):
    entry, logprobs = CASES[name]["rs"][index], packed_case(name)
    config = CorrectionConfig(rejections=rejection_rules(entry))
    keep = kept_tokens(logprobs, config=config)
    assert torch.equal(keep.float(), flat(name, entry["mask"]))
    check_metrics(MismatchSums.of(logprobs, config=config).finalize(), entry["metrics"])


@pytest.mark.parametrize("name", CASES)
def test_off_policy_metrics_equal_the_golden_vectors(name):
    metrics = MismatchSums.of(packed_case(name), config=CorrectionConfig(mode="none")).finalize()
    check_metrics(metrics, CASES[name]["offpolicy"])


def test_mis_masks_equal_the_k1_rejections_of_the_same_band():
    logprobs = packed_case("fp8like")
    for mode, statistic, high in (("mis_product", "seq_sum_k1", 1.3), ("mis_geometric", "seq_mean_k1", 1.01)):
        weights = correction_weights(logprobs, config=CorrectionConfig(mode=mode, low=1 / high, cap=high))
        keep = kept_by_rule(logprobs, rule=RejectionConfig(statistic=statistic, high=high))
        assert torch.equal(weights, keep.float())
        assert 0 < weights.sum() < len(weights)


def test_the_veto_drops_every_sequence_with_an_impossible_token():
    logprobs = packed([[-1.0, -12.0, -1.0], [-2.0]], [[-1.0, -1.0, -1.0], [-1.0]])
    config = CorrectionConfig(veto_ratio=1e-4)
    assert kept_tokens(logprobs, config=config).tolist() == [False, False, False, True]
    metrics = MismatchSums.of(logprobs, config=config).finalize()
    assert metrics["rollout_corr/veto_seq_fraction"] == 0.5
    assert metrics["rollout_corr/kept_fraction"] == 0.25


def test_final_weights_are_normalised_before_tokens_are_rejected():
    logprobs = packed([[-1.0, -1.0], [-1.0, -1.0]], [[-1.5, -1.0], [-4.0, -1.0]])
    config = CorrectionConfig(
        cap=2.0, batch_normalize=True, rejections=(RejectionConfig(statistic="seq_max_k2", high=1.0),)
    )
    mean = (math.exp(0.5) + 1 + 2 + 1) / 4
    sums = normalization_sums(correction_weights(logprobs, config=config), logprobs.lengths, config=config)
    weights = final_weights(logprobs, config=config, sums=sums)
    assert weights.tolist() == pytest.approx([math.exp(0.5) / mean, 1 / mean, 0.0, 0.0])
    with pytest.raises(ValueError, match="normalization_sums were not given"):
        final_weights(logprobs, config=config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["tis_token", "tis_sequence", "mis_geometric"])
def test_weights_and_metrics_on_cuda_equal_those_on_the_cpu(mode):
    logprobs = packed_case("fp8like")
    on_device = PackedLogprobs(
        old_logprobs=logprobs.old_logprobs.cuda(),
        rollout_logprobs=logprobs.rollout_logprobs.cuda(),
        lengths=logprobs.lengths.cuda(),
    )
    config = CorrectionConfig(
        mode=mode, cap=1.1, low=0.9, rejections=(RejectionConfig(statistic="seq_sum_k3", high=0.05),)
    )
    torch.testing.assert_close(final_weights(on_device, config=config).cpu(), final_weights(logprobs, config=config))
    whole = MismatchSums.of(logprobs, config=config)
    assert MismatchSums.of(on_device, config=config).finalize() == pytest.approx(whole.finalize(), rel=1e-5, abs=1e-6)


RULE = RejectionConfig(statistic="seq_max_k2", high=1.0)


@pytest.mark.parametrize(
    ("config", "counted"),
    [
        (CorrectionConfig(mode="tis_token", rejections=(RULE,)), [True, True, False, False, True]),
        (CorrectionConfig(mode="tis_token", veto_ratio=0.05), [True, True, False, False, True]),
        (CorrectionConfig(mode="mis_geometric", cap=2.0, low=0.5), [True, True, False, False, True]),
        (CorrectionConfig(mode="icepop", cap=2.0, low=0.5), [True] * 5),
        (CorrectionConfig(rejections=(RULE,), rejected_in_denominators=True), [True] * 5),
    ],
    ids=["rejection", "veto", "mask", "zero weights are no rejection", "option"],
)
def test_denominators_leave_rejected_tokens_out(config, counted):
    logprobs = packed([[0.0, 0.0], [-5.0, 0.0], [0.0]], [[0.0, 0.0], [0.0, 0.0], [0.0]])
    assert counted_tokens(logprobs, config=config).tolist() == counted
    assert config.counts_kept_tokens == (not all(counted))


def test_log_ratios_beyond_twenty_are_clamped():
    logprobs = packed([[-1.0, -200.0]], [[-100.0, -1.0]])
    weights = correction_weights(logprobs, config=CorrectionConfig(mode="icepop", low=0.0, cap=1e12))
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


def test_k1_is_not_clamped_in_metrics_and_rejections():
    """A mean of log ratios of -99 and 99 and one of -59 is -59 / 3; clamped it would be -20 / 3."""
    logprobs = packed([[-100.0, -1.0, -60.0]], [[-1.0, -100.0, -1.0]])
    assert MismatchSums.of(logprobs, config=CorrectionConfig()).finalize()["rollout_corr/kl"] == pytest.approx(59 / 3)
    rule = RejectionConfig(statistic="seq_sum_k1", high=math.exp(30))
    assert kept_by_rule(logprobs, rule=rule).tolist() == [False] * 3


@st.composite
def sequences_and_cuts(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = [(-rng.exponential(1.0, n)).tolist() for n in lengths]
    rollout = [(np.array(row) + rng.normal(0, 0.3, len(row))).tolist() for row in old]
    homes = draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths)))
    return old, rollout, homes


MODES = ["none", "tis_token", "tis_sequence", "icepop", "icepop_sequence", "mis_product", "mis_geometric"]


@settings(max_examples=60, deadline=None)
@given(data=sequences_and_cuts(), mode=st.sampled_from(MODES))
def test_metrics_do_not_depend_on_the_partition_of_a_step(data, mode):
    old, rollout, homes = data
    rules = (RejectionConfig(statistic="seq_mean_k3", high=0.05), RejectionConfig(statistic="token_k1", high=1.5))
    config = CorrectionConfig(mode=mode, cap=1.5, low=0.7, veto_ratio=0.3, rejections=rules)
    whole = MismatchSums.of(packed(old, rollout), config=config).finalize()
    parts = [
        MismatchSums.of(
            packed(
                [row for row, home in zip(old, homes, strict=True) if home == part],
                [row for row, home in zip(rollout, homes, strict=True) if home == part],
            ),
            config=config,
        )
        for part in range(5)
    ]
    merged = reduce(MismatchSums.merge, parts, MismatchSums.empty(config=config)).finalize()
    assert merged == pytest.approx(whole, rel=1e-6, abs=1e-9)
    # The same through vectors, as an all-reduce would do it.
    vectors = [part.vectors() for part in parts]
    summed = torch.stack([summed for summed, _ in vectors]).sum(0)
    maximised = torch.stack([maximised for _, maximised in vectors]).amax(0)
    assert parts[0].from_vectors(summed, maximised).finalize() == pytest.approx(whole, rel=1e-6, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(data=sequences_and_cuts(), mode=st.sampled_from(MODES))
def test_normalised_weights_have_mean_one_over_all_parts(data, mode):
    old, rollout, homes = data
    config = CorrectionConfig(mode=mode, cap=1.5, low=0.1, batch_normalize=True)
    parts = [
        packed(
            [row for row, home in zip(old, homes, strict=True) if home == part],
            [row for row, home in zip(rollout, homes, strict=True) if home == part],
        )
        for part in set(homes)
    ]
    weights = [correction_weights(part, config=config) for part in parts]
    sums = sum(normalization_sums(w, part.lengths, config=config) for w, part in zip(weights, parts, strict=True))
    normalised = [normalize(w, sums) for w in weights]
    totals = sum(normalization_sums(w, part.lengths, config=config) for w, part in zip(normalised, parts, strict=True))
    if sums[0] > 0:
        assert float(totals[0] / totals[1]) == pytest.approx(1.0, rel=1e-5)


def test_quantiles_of_the_log_ratio_are_exact_to_a_bin():
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(0, 0.02, 20_000)
    metrics = MismatchSums.of(
        packed([log_ratio.tolist()], [np.zeros(20_000).tolist()]), config=CorrectionConfig()
    ).finalize()
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)):
        expected = np.quantile(np.abs(log_ratio), quantile)
        assert metrics[f"rollout_corr/abs_log_ratio_{name}"] == pytest.approx(expected, rel=0.04)
    assert metrics["rollout_corr/abs_log_ratio_max"] == pytest.approx(np.abs(log_ratio).max(), rel=1e-5)


def test_a_step_without_tokens_has_no_metrics():
    assert MismatchSums.empty(config=CorrectionConfig()).finalize() == {}
