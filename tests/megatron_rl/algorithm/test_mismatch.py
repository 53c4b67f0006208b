import pytest
import torch

from megatron_rl.algorithm.correction import PackedLogprobs, k3
from megatron_rl.algorithm.mismatch import LOG_RATIO_BOUND, MismatchSums, SumsByAge
from megatron_rl.correction_config import CorrectionConfig


def packed(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, rollout = (torch.randn(sum(lengths), generator=generator) - 3 for _ in range(2))
    return PackedLogprobs(old_logprobs=old, rollout_logprobs=rollout, lengths=torch.tensor(lengths, dtype=torch.int64))


def test_every_token_counts_for_the_staleness_of_its_response_under_any_partition():
    lengths, ages = [3, 5, 2, 7], [0, 2, 0, 2]
    pair = packed(lengths)
    weights = pair.log_ratio.exp().clamp(max=2.0)
    whole = SumsByAge.empty(2)
    whole.add(pair, weights, torch.tensor(ages))
    parts, first = SumsByAge.empty(2), 0
    for length, age in zip(lengths, ages, strict=True):
        cut = slice(first, first + length)
        one = PackedLogprobs(
            old_logprobs=pair.old_logprobs[cut],
            rollout_logprobs=pair.rollout_logprobs[cut],
            lengths=torch.tensor([length]),
        )
        parts.add(one, weights[cut], torch.tensor([age]))
        first += length
    torch.testing.assert_close(whole.sums, parts.sums)
    found = whole.metrics()
    stale = torch.cat([weights[3:8], weights[10:]]).double()
    assert found["rollout_corr/stale_2/tokens"] == 12
    assert found["rollout_corr/stale_2/weight_mean"] == pytest.approx(float(stale.mean()))
    assert found["rollout_corr/stale_2/eff_sample_size"] == pytest.approx(
        float(stale.sum() ** 2 / (12 * stale.square().sum()))
    )
    gaps = torch.cat([pair.log_ratio[:3], pair.log_ratio[8:10]]).double()
    assert found["rollout_corr/stale_0/k3_kl"] == pytest.approx(float(k3(gaps).mean()))
    assert not any("stale_1" in name for name in found)


def test_fresh_responses_and_empty_micro_batches_give_no_metrics():
    fresh = SumsByAge.empty(0)
    fresh.add(packed([4]), torch.ones(4), torch.tensor([0]))
    assert fresh.metrics() == {}
    nothing = SumsByAge.empty(1)
    nothing.add(packed([]), torch.ones(0), torch.zeros(0, dtype=torch.int64))
    assert nothing.metrics() == {}


def test_a_token_without_a_number_counts_as_the_largest_so_that_the_step_reaches_its_skipped_update():
    """A NaN gradient is skipped on all ranks; the metrics before it must not end the step."""
    pair = packed([3])
    pair.old_logprobs[1] = torch.nan
    found = MismatchSums.of(pair, config=CorrectionConfig())
    assert found.histogram.sum() == 3 and found.histogram[-2:].sum() == 1
    assert found.finalize()["rollout_corr/abs_log_ratio_p999"] >= LOG_RATIO_BOUND
