"""Metrics over the steps of a run."""

from benchmarks.harness.example_run import mismatch_figures, trained


def test_steps_that_trained_nothing_have_no_mismatch_and_are_left_out() -> None:
    ess = "rollout_corr/rollout_is_eff_sample_size"
    metrics = [{"step": 0, "rollout_corr/k3_kl": 0.2, ess: 0.9}, {"step": 1}, {"step": 2, "rollout_corr/k3_kl": 0.4}]
    assert [row["step"] for row in trained(metrics)] == [0, 2]
    found = mismatch_figures(metrics)
    assert found["k3_median"] == (0.2 + 0.4) / 2
    assert (found["k3_min"], found["k3_max"], found["ess_min"]) == (0.2, 0.4, 0.9)
    assert mismatch_figures([{"step": 0}]) == {}
