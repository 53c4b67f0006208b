"""References of the formats, and the coarse control format."""

import pytest
import torch

from benchmarks.harness.record import Row
from benchmarks.learning.mismatch import BY_STEP, FORMATS, _by_step, goals, picture


def rows(**after: float) -> list[Row]:
    return [
        {"seed": seed, "format": name, "correction": mode, "held_out_after": after.get(f"{name} {mode}", 0.9)}
        for seed in (1, 2)
        for name in FORMATS
        for mode in ("tis_token", "none")
    ]


def test_formats_are_compared_with_bf16_and_correction_must_help_the_harmful_control() -> None:
    found = {goal.name: goal.met for goal in goals(rows(**{"3 bits none": 0.6, "fp8_block tis_token": 0.8}))}
    assert found == {
        "int8 with TIS below bf16, held-out, upper end over seeds": True,
        "fp8_channel with TIS below bf16, held-out, upper end over seeds": True,
        "fp8_block with TIS below bf16, held-out, upper end over seeds": False,
        "3 bits hurts without TIS, held-out, lower end over seeds": True,
        "3 bits is helped by TIS, held-out, lower end over seeds": True,
    }
    assert not any(goal.met for goal in goals(rows()) if "3 bits" in goal.name)
    assert goals([row for row in rows() if row["format"] == "int8"]) == []


def test_a_mean_whose_seeds_scatter_shows_neither_that_a_format_is_harmless_nor_that_the_control_hurts() -> None:
    scattered = [
        {**row, "held_out_after": 0.9 + (0.05 if row["seed"] == 1 else -0.06)}
        if (row["format"], row["correction"]) in (("int8", "tis_token"), ("3 bits", "none"))
        else row
        for row in rows()
    ]
    found = {goal.name: goal for goal in goals(scattered)}
    # by hand: differences -5 and 6 points; mean 0.5, standard error 5.5, and 12.7 of these on both sides
    int8 = found["int8 with TIS below bf16, held-out, upper end over seeds"]
    hurts = found["3 bits hurts without TIS, held-out, lower end over seeds"]
    assert int8.value == pytest.approx(0.5 + 12.7 * 5.5) and not int8.met
    assert hurts.value == pytest.approx(0.5 - 12.7 * 5.5) and not hurts.met


def test_the_controls_codes_are_multiples_of_32(monkeypatch) -> None:
    from megatron_rl.quantization import backends
    from megatron_rl.quantization.formats import CODE_FORMATS

    monkeypatch.setattr(backends, "BACKENDS", list(backends.BACKENDS))
    from benchmarks.learning.coarse_codes import Coarse

    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    control = backends.Quantizer(format=CODE_FORMATS["int8"], backend=Coarse())
    codes = control.codes(weight, control.factors(control.amax(weight, (0, 0))), (0, 0))
    assert set(codes.unique().tolist()) <= set(range(-96, 97, 32))
    assert len(codes.unique()) == 7


def test_plots_show_means_over_seeds_of_trained_steps() -> None:
    metrics = [{"rollout_corr/k3_kl": 0.5, "reward/mean": 0.25}, {"reward/mean": 0.0}, {"rollout_corr/k3_kl": 0.125}]
    assert _by_step(metrics, "rollout_corr/k3_kl") == "0.5 0.125"
    some = [{**row, "k3_by_step": "1e-3 2e-3", "ess_by_step": "0.9 0.8", "reward_by_step": "0.1"} for row in rows()]
    for name in BY_STEP:
        shown = picture(some, name)
        assert shown.startswith("<svg")
        assert ("fp8_block" in shown) == (name != "reward")
        assert ("3 bits, without TIS" in shown) == (name == "reward")
