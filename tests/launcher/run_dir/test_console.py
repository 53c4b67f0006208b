import io
import re
from dataclasses import replace

from rich.console import Console

from launcher.run_dir.console import RunProgress, before_after_table, step_line
from launcher.run_dir.step_timeline import BETWEEN_STEPS
from rollout.evaluation import EvaluationRow, changes

METRICS = {
    "reward/mean": 0.51249,
    "response_length/mean": 31.6,
    "response_length/clip_ratio": 0.015,
    "rollout_corr/k3_kl": 1.64e-4,
    "rollout_corr/rollout_is_eff_sample_size": 0.99971,
    "perf/throughput_tokens_s": 8123.4,
    "timing_s/rollout": 1.25,
    "timing_s/train": 0.9,
    "timing_s/publish": 0.11,
    "timing_s/step": 2.31,
    "reward/errors": 0.0,
}


def row(
    step: int, average: float, weight_format: str = "bf16", source: str = "all", *, k: int = 1, num_prompts: int = 512
) -> EvaluationRow:
    return EvaluationRow(
        set_name="held_out",
        data_source=source,
        format=weight_format,
        step=step,
        num_prompts=num_prompts,
        samples_per_prompt=k,
        average=average,
        passed=average,
        truncated=0.0,
        mean_length=20.0,
    )


def plain(height: int = 40) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=160, height=height), text


def test_a_step_line_has_metrics_and_seconds_by_phase() -> None:
    assert step_line(0, 20, METRICS) == (
        "step  1/20  reward 0.512  length 32  cut 1.5%  k3 1.6e-04  ESS 0.9997  tok/s 8123  "
        "2.3 s (rollout 1.2, train 0.9, publish 0.1)"
    )


def test_a_step_line_ends_with_the_evaluation_and_the_checkpoint_before_the_step() -> None:
    line = step_line(0, 20, {"timing_s/evaluate_before_step": 1.5, "timing_s/checkpoint_before_step": 0.25})
    assert line == "step  1/20  before it: evaluate 1.5, checkpoint 0.2"


def test_a_step_line_names_everything_that_lay_between_the_steps() -> None:
    seconds = {f"timing_s/{activity}_before_step": float(number) for number, activity in enumerate(BETWEEN_STEPS, 1)}
    line = step_line(0, 20, seconds)
    assert line == "step  1/20  before it: evaluate 1.0, checkpoint 2.0, publish 3.0, switch 4.0"


def test_a_missing_metric_is_left_out_and_not_shown_as_zero() -> None:
    assert step_line(4, 20, {"reward/mean": 1.0}) == "step  5/20  reward 1.000"


def test_fault_counters_are_shown_only_if_nonzero() -> None:
    assert "! 3 reward errors" in step_line(0, 2, {**METRICS, "reward/errors": 3.0})


def test_the_table_separates_bf16_from_8_bit_rows_with_bf16_first() -> None:
    rows = [row(0, 0.40, "int8"), row(0, 0.42), row(20, 0.80, "int8"), row(20, 0.82), row(10, 0.6, "int8")]
    found = changes(rows)
    assert [(one.before.format, one.before.average, one.after.average) for one in found] == [
        ("bf16", 0.42, 0.82),
        ("int8", 0.40, 0.80),
    ]
    assert [round(one.points, 6) for one in found] == [40.0, 40.0]
    console, text = plain()
    console.print(before_after_table(rows))
    lines = [line for line in text.getvalue().splitlines() if "held_out" in line]
    assert "BF16" in lines[0] and "0.420" in lines[0] and "+40.0" in lines[0]
    assert "INT8 (8-bit engine)" in lines[1] and "0.800" in lines[1]


def test_whole_sets_are_listed_before_their_data_sources() -> None:
    rows = [row(step, 0.1, source=source) for step in (0, 9) for source in ("b", "all", "a")]
    assert [one.label for one in changes(rows)] == ["held_out", "held_out/a", "held_out/b"]


def test_the_table_compares_no_evaluations_of_another_k_or_number_of_prompts_and_names_both_steps() -> None:
    rows = [row(0, 0.6, num_prompts=8, k=4), row(0, 0.2, k=4), row(100, 0.3, k=4)]
    rows += [row(200, 0.8, k=16), row(150, 0.5, k=16)]
    console, text = plain()
    RunProgress(200, console).table(rows)
    *lines, said = [" ".join(line.split()) for line in text.getvalue().splitlines() if "held_out" in line]
    assert "after 0, 100, 150, 200 steps are not all compared" in said
    assert [re.findall(r"(\d+) │ 512 │ (\d+ -> \d+) │ (0.\d+) │ (0.\d+)", line) for line in lines] == [
        [("4", "0 -> 100", "0.200", "0.300")],
        [("16", "150 -> 200", "0.500", "0.800")],
    ]


def test_an_evaluation_of_a_single_step_is_not_compared_with_itself() -> None:
    rows = [row(200, 0.8), row(200, 0.8, "int8"), row(0, 0.4, "int8")]
    assert [one.before.format for one in changes(rows)] == ["int8"]
    console, text = plain()
    RunProgress(200, console).table(rows[:2])
    assert text.getvalue() == ""


def test_a_set_whose_settings_changed_between_its_evaluations_has_a_line_instead_of_a_row() -> None:
    rows = [replace(row(0, 0.2, "int8"), settings="a"), replace(row(200, 0.5, "int8"), settings="b")]
    line = (
        "held_out, INT8 (8-bit engine): the evaluations after 0, 200 steps are not compared, because they differ in "
        "the set's file, limit or sampling"
    )
    console, text = plain()
    RunProgress(200, console).table(rows)
    assert text.getvalue() == line + "\n"
    console, text = plain()
    RunProgress(200, console).table([*rows, row(0, 0.3), row(200, 0.6)])
    assert "+30.0" in text.getvalue() and text.getvalue().endswith(line + "\n")


def test_a_set_of_another_scale_is_named_once_and_has_no_points() -> None:
    console, text = plain()
    progress = RunProgress(20, console)
    other = [replace(row(step, average), outside=-1.0) for step, average in ((0, -0.8), (20, 0.25))]
    for one in other:
        progress.evaluation([one, replace(one, data_source="math"), replace(row(one.step, 0.5), set_name="right")])
    lines = text.getvalue().splitlines()
    said = "held_out: the score -1 is not between 0 and 1, so avg@k is a mean score and no accuracy; let the reward "
    assert [line.startswith(said) for line in lines] == [False] * 3 + [True] + [False] * 3
    console, text = plain()
    RunProgress(20, console).table([*other, *[replace(row(step, 0.5), set_name="right") for step in (0, 20)]])
    cells = [[cell.strip() for cell in line.split("│")] for line in text.getvalue().splitlines() if "│ BF16" in line]
    assert [line[6:9] for line in cells] == [["-0.800", "0.250", ""], ["0.500", "0.500", "+0.0"]]
    assert text.getvalue().splitlines()[-1].startswith(said)


def test_output_without_a_terminal_has_lines_and_no_control_characters() -> None:
    console, text = plain()
    progress = RunProgress(20, console)
    for done in range(5):
        progress.phase("rollout", done, 4)
    progress.step(0, METRICS)
    progress.evaluation([row(0, 0.5)])
    progress.close()
    assert "\x1b" not in text.getvalue()
    assert len(text.getvalue().splitlines()) == 2


def test_on_a_terminal_a_bar_disappears_before_the_next_line() -> None:
    text = io.StringIO()
    progress = RunProgress(2, Console(file=text, force_terminal=True, width=120))
    progress.phase("rollout", 1, 4)
    progress.phase("rollout", 4, 4)
    progress.step(0, METRICS)
    assert "rollout" in text.getvalue()
    assert text.getvalue().endswith("publish 0.1)\n")
