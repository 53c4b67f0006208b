"""Each cause of the mismatch is planted alone, and only its part rises, by the closed form."""

import math

import pytest
import torch

from megatron_rl.algorithm.mismatch_parts import PartSums, SampledTokens

COUNT = 24
SIGNS = torch.tensor([1.0, -1.0]).repeat(COUNT // 2)
OLD_AGES = torch.tensor([0, 1, 2] * (COUNT // 3))
REJECTED = torch.arange(COUNT) % 4 == 0


def sample(quantisation: torch.Tensor, rest: torch.Tensor, *, ages: torch.Tensor | None = None, resampled=None):
    """Tokens whose log ratios are these two differences."""
    old = torch.linspace(-3, -1, COUNT, dtype=torch.float64)
    return SampledTokens(
        old_logprobs=old,
        code_logprobs=old - quantisation,
        rollout_logprobs=old - quantisation - rest,
        ages=torch.zeros(COUNT, dtype=torch.int64) if ages is None else ages,
        resampled=torch.zeros(COUNT, dtype=torch.bool) if resampled is None else resampled,
    )


def parts(tokens: SampledTokens, max_staleness: int = 2) -> dict[str, float]:
    sums = PartSums.empty(max_staleness)
    sums.add(tokens)
    return {name.removeprefix("rollout_corr/part_"): value for name, value in sums.metrics().items()}


def k3_of(size: float) -> float:
    """Mean of exp(lr) - 1 - lr over lr = +size and -size."""
    return math.cosh(size) - 1


def ess_of(size: float) -> float:
    """(mean of w)^2 / mean of w^2 over w = exp(+size) and exp(-size)."""
    return math.cosh(size) ** 2 / math.cosh(2 * size)


def test_coarse_codes_raise_quantisation_alone() -> None:
    found = parts(sample(0.3 * SIGNS, 0 * SIGNS, ages=OLD_AGES, resampled=REJECTED))
    assert found["k3/quantisation"] == pytest.approx(k3_of(0.3))
    assert found["k3/total"] == pytest.approx(k3_of(0.3))
    assert found["ess/quantisation"] == pytest.approx(ess_of(0.3)) == pytest.approx(found["ess/total"])
    for name in ("numerics", "speculation", "stale_1", "stale_2", "interaction"):
        assert found[f"k3/{name}"] == pytest.approx(0, abs=1e-12), name
    for name in ("numerics", "speculation", "stale_1", "stale_2"):
        assert found[f"ess/{name}"] == pytest.approx(1), name


def test_other_kernels_raise_numerics_alone() -> None:
    found = parts(sample(0 * SIGNS, 0.2 * SIGNS))
    assert found["k3/numerics"] == pytest.approx(k3_of(0.2)) == pytest.approx(found["k3/total"])
    assert found["ess/numerics"] == pytest.approx(ess_of(0.2))
    assert found["k3/quantisation"] == found["k3/speculation"] == 0
    assert found["ess/quantisation"] == 1
    assert not any("stale" in name for name in found)


def test_an_old_policy_raises_staleness_by_its_age_alone() -> None:
    found = parts(sample(0 * SIGNS, 0.1 * OLD_AGES * SIGNS, ages=OLD_AGES, resampled=REJECTED))
    third = OLD_AGES == 1
    assert found["k3/numerics"] == pytest.approx(0, abs=1e-12)
    assert found["k3/speculation"] == pytest.approx(0, abs=1e-12)
    assert found["k3/quantisation"] == found["k3/interaction"] == 0
    assert int(third.sum()) * 3 == COUNT
    assert found["k3/stale_1"] == pytest.approx(k3_of(0.1) / 3)
    assert found["k3/stale_2"] == pytest.approx(k3_of(0.2) / 3)
    assert found["ess/stale_2"] == pytest.approx(ess_of(0.2))
    assert found["ess/numerics"] == pytest.approx(1)
    assert found["fresh_tokens"] == COUNT / 3


def test_wrong_tokens_at_rejected_drafts_raise_speculation_alone() -> None:
    found = parts(sample(0 * SIGNS, torch.where(REJECTED, 0.4, 0.0) * torch.ones(COUNT), resampled=REJECTED))
    at_rejected = math.exp(0.4) - 1 - 0.4
    assert found["k3/speculation"] == pytest.approx(at_rejected / 4) == pytest.approx(found["k3/total"])
    assert found["k3/numerics"] == found["k3/quantisation"] == 0
    assert found["ess/speculation"] == pytest.approx(1)  # one ratio for all of them
    assert found["ess/numerics"] == 1
    assert found["ess/total"] == pytest.approx((0.75 + 0.25 * math.exp(0.4)) ** 2 / (0.75 + 0.25 * math.exp(0.8)))


def test_the_parts_of_any_tokens_add_up_and_do_not_depend_on_the_split() -> None:
    generator = torch.Generator().manual_seed(3)
    gaps = [0.5 * torch.randn(COUNT, generator=generator, dtype=torch.float64) for _ in range(2)]
    tokens = sample(*gaps, ages=OLD_AGES, resampled=REJECTED)
    found = parts(tokens)
    k3s = {name: value for name, value in found.items() if name.startswith("k3/")}
    total = k3s.pop("k3/total")
    log_ratio = gaps[0] + gaps[1]
    assert total == pytest.approx(float((log_ratio.exp() - 1 - log_ratio).mean()))
    assert sum(k3s.values()) == pytest.approx(total)
    halves = PartSums.empty(2)
    for half in (slice(0, 7), slice(7, None)):
        halves.add(
            SampledTokens(
                old_logprobs=tokens.old_logprobs[half],
                code_logprobs=tokens.code_logprobs[half],
                rollout_logprobs=tokens.rollout_logprobs[half],
                ages=OLD_AGES[half],
                resampled=REJECTED[half],
            )
        )
    assert halves.metrics() == pytest.approx({f"rollout_corr/part_{name}": value for name, value in found.items()})


def test_without_fresh_tokens_staleness_includes_numerics_and_the_parts_still_add_up() -> None:
    found = parts(sample(0.1 * SIGNS, 0.2 * SIGNS, ages=torch.ones(COUNT, dtype=torch.int64), resampled=REJECTED))
    assert found["fresh_tokens"] == 0
    assert "k3/numerics" not in found and "k3/speculation" not in found
    assert found["k3/stale_1"] == pytest.approx(k3_of(0.2))
    assert found["k3/total"] == pytest.approx(sum(found[f"k3/{n}"] for n in ("quantisation", "interaction", "stale_1")))


def test_no_tokens_give_no_metrics() -> None:
    assert PartSums.empty(1).metrics() == {}
