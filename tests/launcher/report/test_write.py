import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from history.drafting.stats import CALIBRATION_BINS, SOURCES, DraftStats
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.report.run_timeline import Step
from launcher.report.timeline_section import last_steps
from launcher.report.write import main, read_record, write_report
from launcher.run_dir.atomic_files import replace_rows
from launcher.run_dir.directory import RunDirectory
from launcher.run_dir.forward_traces import append_forwards
from megatron_rl.weights.quantization_stats import QuantizationStats, code_metrics
from rollout.evaluation import EvaluationRow
from rollout.tracing.engine_speed import fit_speed
from tests.support.runs.synthetic_run import NUM_ENGINES, ORIGIN_S, decode, write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balance(HTMLParser):
    """Fails on a closing tag without its opening tag; counts elements."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def fill(path: Path, num_steps: int = 6) -> None:
    config = RunConfig.model_validate(
        {"model": "m", "run_dir": "r", "num_steps": 6, "data": {"train": [{"path": "x"}]}, "engine": {"format": "int8"}}
    )
    with RunDirectory(path) as run:
        run.write_config(resolved_yaml(config))
        run.write_environment({"commit": "0123456789abcdef"})
        for step in range(num_steps):
            run.append_metrics(
                step,
                {
                    "reward/mean": 0.4 + 0.05 * step,
                    "response_length/mean": 20.0 + step,
                    "response_length/max": 90.0,
                    "rollout_corr/k3_kl": 2e-4,
                    "rollout_corr/rollout_is_eff_sample_size": 0.999,
                    "timing_s/rollout": 1.5,
                    "timing_s/train": 1.0,
                    "timing_s/step": 2.6,
                },
                ended_s=ORIGIN_S + 3.0 * step,
            )
            sample = {"prompt": "1 < 2 & 3", "response": "<script>alert(1)</script>", "ground_truth": "2", "length": 3}
            replace_rows(run.samples_path(step), [{**sample, "reward": reward} for reward in (0.0, 1.0, 0.5, 0.25)])
        for step, average in ((0, 0.42), (3, 0.6), (6, 0.8)):
            for weight_format in ("bf16", "int8"):
                one = EvaluationRow(
                    set_name="held_out",
                    data_source="all",
                    format=weight_format,
                    step=step,
                    num_prompts=512,
                    samples_per_prompt=1,
                    average=average,
                    passed=average,
                    truncated=0.0,
                    mean_length=20.0,
                )
                run.append_evaluation([one.as_row()])


def test_the_report_is_one_well_formed_page_that_needs_no_network(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert page.count["svg"] == 6
    assert not set(page.count) & {"script", "link", "img", "iframe"}
    outside = [
        url for url in re.findall(r"""(?:href|src|url)\s*[=(]\s*["']?([^"')\s>]+)""", text) if not url.startswith("#")
    ]
    assert outside == []


def test_the_report_shows_accuracy_per_format_and_escapes_model_output(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert text.count("42.0 → 80.0 %") == 2
    assert "INT8 (8-bit engine)" in text and "BF16" in text
    assert "+38.0" in text
    assert "int8 rollouts" in text and "commit 0123456789ab" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def row(step: int, average: float, *, k: int, num_prompts: int = 30) -> dict[str, object]:
    counts = {"num_prompts": num_prompts, "samples_per_prompt": k}
    figures = {"average": average, "passed": average, "truncated": 0.0, "mean_length": 20.0}
    return EvaluationRow(set_name="aime", data_source="all", format="bf16", step=step, **counts, **figures).as_row()


def test_evaluations_with_another_k_or_number_of_prompts_are_compared_neither_in_figures_nor_in_curves(
    tmp_path: Path,
) -> None:
    rows = [row(0, 0.2, k=4), row(100, 0.3, k=4), row(200, 0.8, k=16), row(150, 0.5, k=16)]
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {}, ended_s=ORIGIN_S)
        run.append_evaluation(rows)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    tiles = re.findall(r'<div class="value">(.*?)</div><div class="note">(.*?)</div>', text)
    assert tiles == [
        ("20.0 → 30.0 %", "+10.0 points of avg@4, 0 to 100 steps"),
        ("50.0 → 80.0 %", "+30.0 points of avg@16, 150 to 200 steps"),
    ]
    cells = re.findall(r"<td.*?>(.*?)</td>", text)
    assert [cells[at : at + 7] for at in (2, 13)] == [
        ["30", "4", "0 → 100", "0.200", "0.300", "+10.0", "0.200"],
        ["30", "16", "150 → 200", "0.500", "0.800", "+30.0", "0.500"],
    ]
    assert "<svg" not in text, "no curve has three points"
    with RunDirectory(tmp_path) as run:
        run.append_evaluation([row(50, 0.25, k=4), row(250, 0.9, k=16, num_prompts=8)])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"</i>(aime.*?) <b>", text) == ["aime (bf16, avg@4, 30 prompts)"]


def test_a_mean_of_scores_outside_0_to_1_is_shown_as_a_mean_score_and_not_in_per_cent(tmp_path: Path) -> None:
    rows = [row(0, -0.8, k=4), row(100, 0.1, k=4), row(200, -0.2, k=4)]
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {}, ended_s=ORIGIN_S)
        run.append_evaluation(rows)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    tile = '<div class="label">(.*?)</div><div class="value">(.*?)</div><div class="note">(.*?)</div>'
    assert re.findall(tile, text) == [("aime mean score, BF16", "-0.800 → -0.200", "+0.600 of avg@4, 0 to 200 steps")]
    assert "<figcaption>Mean score <span>avg@k</span>" in text
    words = re.sub("<.*?>", " ", text.partition("<main>")[2])
    assert [word for word in ("80.0", "%", "Accuracy", "points of") if word in words] == []
    assert re.findall(r"<td.*?>(.*?)</td>", text)[5:9] == ["-0.800", "-0.200", "", "-0.800"]
    (said,) = re.findall(r'<p class="note">(aime.*?)</p></section>', text)
    assert html.unescape(said) == (
        "aime: the score -0.8 is not between 0 and 1, so avg@k is a mean score and no accuracy; let the reward "
        "function return an accuracy from 0 to 1 as `acc` beside `score`."
    )


def test_accuracies_and_scores_of_another_scale_have_charts_of_their_own(tmp_path: Path) -> None:
    rows = [row(step, 0.5, k=4) for step in (0, 100, 200)]
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {}, ended_s=ORIGIN_S)
        run.append_evaluation([*rows, *[{**each, "set_name": "other", "outside": 3.0} for each in rows]])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    charts = re.findall(r"<figcaption>(.*?) <span>avg@k</span>.*?</i>(.*?) \(", text)
    assert charts == [("Accuracy", "aime"), ("Mean score", "other")]


def test_a_set_whose_settings_changed_between_its_evaluations_has_a_sentence_with_the_reason(tmp_path: Path) -> None:
    other = {"settings": "b"}
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {}, ended_s=ORIGIN_S)
        run.append_evaluation([{**row(0, 0.2, k=4), "settings": "a"}, {**row(200, 0.5, k=4), **other}])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    (note,) = re.findall(r'<section id="evaluation"><h2>Evaluation</h2><p class="note">(.*?)</p></section>', text)
    assert html.unescape(note) == (
        "aime, BF16: the evaluations after 0, 200 steps are not compared, because they differ in the set's file, "
        "limit or sampling."
    )
    assert "points of" not in text
    with RunDirectory(tmp_path) as run:
        more = [{**row(step, 0.3, k=4), "settings": "a"} for step in (50, 100)]
        run.append_evaluation([*more, *[{**row(step, 0.6, k=4), **other} for step in (0, 150)]])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "not compared" not in text
    label = "aime (bf16, avg@4, 30 prompts), steps 0 to"
    assert re.findall(r"</i>(aime.*?) <b>", text) == [f"{label} 100", f"{label} 200"]


def test_evaluations_of_a_single_step_are_no_section(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {}, ended_s=ORIGIN_S)
        run.append_evaluation([row(200, 0.8, k=4)])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Evaluation" not in text and "points of" not in text


def test_samples_of_steps_that_a_resume_takes_again_are_not_shown(tmp_path: Path) -> None:
    """The course that had these steps ended; its files stay until the steps are taken again."""
    fill(tmp_path / "run")
    with RunDirectory(tmp_path / "run") as run:
        run.resume_at(4)
    assert list(read_record(tmp_path / "run").samples) == [0, 3]
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["step 1", "step 4"]
    with RunDirectory(tmp_path / "run") as run:
        run.resume_at(0)
    assert read_record(tmp_path / "run").samples == {}


def test_charts_without_recorded_metrics_are_left_out(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"reward/mean": 0.5}, ended_s=ORIGIN_S)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "Evaluation" not in text


def test_drafts_have_their_own_charts(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, DraftStats(num_forwards=4, num_rows=10, num_emitted=10).metrics(), ended_s=ORIGIN_S)
        found = DraftStats(
            num_rows=10,
            num_emitted=23,
            num_drafted=20,
            num_accepted=13,
            accepted_by_source=(9, 2, 1, 1),
            calibration_count=(20,) + (0,) * (CALIBRATION_BINS - 1),
        ).metrics()
        seen = {"history/reusable_share": 0.8, "history/length_rank_correlation": 0.7}
        run.append_metrics(1, {**found, **seen, "history/saved_s_measured": 2.0}, ended_s=ORIGIN_S)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 6
    assert "1.00 → 2.30" in text
    assert "rank correlation" in text
    for source in SOURCES:
        assert f"</i>{source} <b>" in text


def test_publishing_has_its_own_charts(tmp_path: Path) -> None:
    layers = {
        layer: QuantizationStats(signal=10.0**layer, noise=0.01, num_codes=9, num_compared=9) for layer in range(4)
    }
    with RunDirectory(tmp_path) as run:
        for step in range(2):
            times = {"timing_s/publish_pack": 0.5, "timing_s/publish_apply": 1.0, "publish/wire_bytes": 1e6}
            run.append_metrics(step, {**times, **code_metrics(layers)}, ended_s=ORIGIN_S)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 4
    assert "Publishing" in text
    for said in (">pack <", ">apply <", ">layer<", ">dB<"):
        assert said in text


def test_engine_time_is_drawn_with_a_legend_and_the_whole_trace_is_written_beside_the_page(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert "The last 3 steps" in text
    assert text.count("<svg") - text.count('class="lane"') == 5 - 1
    rows = [f"engine {number}" for number in range(NUM_ENGINES)] + [
        "trainer",
        "publisher",
        "evaluation",
        "step 4",
        "step 6",
    ]
    legend = ["saturated", "under-filled", "idle: others still sample", "idle: trainer works"]
    done = ["trains", "publishes", "saves", "evaluates"]
    for said in [*rows, *legend, *done, "bubble of the engines&#x27; time"]:
        assert f">{said}<" in text
    assert "</i>idle: others still sample <b>" in text and "</i>bubble <b>" in text
    assert (tmp_path / "timeline.json").exists()


def test_missing_parts_of_a_timeline_are_reported_in_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path, num_steps=2)
    with (tmp_path / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"actor": "tra')
    assert "1 of 7 lines of events.jsonl could not be read" in write_report(tmp_path).read_text(encoding="utf-8")
    for path in (tmp_path / "traces").iterdir():
        path.unlink()
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "No forwards of engines were recorded" in text and ">trains<" in text


def write_starts(path: Path) -> None:
    """Four engines take two steps; a minute later, two slower engines with fewer requests take four.

    The trainer trains for three seconds of each step, after all forwards.
    """
    now = ORIGIN_S
    with RunDirectory(path) as run:
        for step, (num_engines, slots, slow) in enumerate([(4, 64, 1.0)] * 2 + [(2, 16, 3.0)] * 4):
            if step == 2:
                now += 60.0
            began = now
            run.record_span("trainer", "train", began + 24.0, began + 27.0)
            for engine in range(num_engines):
                forwards = decode(began, np.full(128, 30), slots)
                forwards["started_at_s"] = began + (forwards["started_at_s"] - began) * slow
                forwards["seconds"] *= slow
                append_forwards(path / "traces", engine, forwards)
            now = began + 30.0
            run.append_metrics(step, {"timeline/elapsed_s": now - began, "timing_s/step": now - began}, ended_s=now)


def test_engines_of_an_earlier_start_have_no_lane_and_no_waits_later(tmp_path: Path) -> None:
    write_starts(tmp_path)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"<span>(engine \d)</span>", text) == ["engine 0", "engine 1"]
    assert "2 of 4 engines ran no forward in these steps and have no lane." in text
    trace = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))
    trained = {
        row: [
            event["ts"] for event in trace["traceEvents"] if event["tid"] == row and event["name"] == "waits: trainer"
        ]
        for row in range(4)
    }
    assert [len(waits) for waits in trained.values()] == [6, 6, 2, 2]


def test_the_time_of_a_run_counts_evaluations_and_checkpoints_and_no_pause(tmp_path: Path) -> None:
    elapsed_s = [100.0, 700.0, 160.0, 100.0]  # an evaluation, a checkpoint; the last step follows a day in a queue
    rows = [
        {"step": step, "time_s": ORIGIN_S + 90_000 * (step == 3), "timing_s/step": 100.0, "timeline/elapsed_s": seconds}
        for step, seconds in enumerate(elapsed_s)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(tmp_path).read_text(encoding="utf-8")
    tile = re.search('seconds a step</div><div class="value">(.*?)</div><div class="note">(.*?)<', text)
    assert tile is not None
    assert tile.groups() == ("265.0", "1060 s from the first step to the last")


def test_the_speed_is_that_of_the_engines_since_the_last_start(tmp_path: Path) -> None:
    write_starts(tmp_path)
    speed = read_record(tmp_path).timeline.speed
    assert speed is not None and speed.saturated_requests == 16
    forwards = decode(ORIGIN_S, np.full(128, 30), 16)
    forwards["seconds"] *= 3.0
    assert speed == fit_speed(np.tile(forwards, 8))


def test_too_few_forwards_since_the_last_start_give_no_speed(tmp_path: Path) -> None:
    """Those of earlier starts may be of other engines."""
    with RunDirectory(tmp_path) as run:
        for step, begin_s in enumerate((ORIGIN_S, ORIGIN_S + 100.0)):
            append_forwards(tmp_path / "traces", 0, decode(begin_s, np.full(64, 100 if step == 0 else 9)))
            run.append_metrics(step, {"timing_s/step": 20.0}, ended_s=begin_s + 20.0)
    found = read_record(tmp_path).timeline
    assert found.speed is None
    assert "9 forwards since the last start are too few to fit the speed of the engines." in found.notes


def test_steps_before_and_after_a_long_pause_are_not_drawn_together() -> None:
    steps = [Step(number=n, start_s=s, end_s=s + 10) for n, s in enumerate((0, 10, 90_000, 90_011))]
    assert [step.number for step in last_steps(steps)] == [2, 3]
    assert [step.number for step in last_steps(steps[:2])] == [0, 1]
    assert last_steps([]) == []


def test_a_run_without_drafts_has_no_draft_charts(tmp_path: Path) -> None:
    fill(tmp_path / "run")
    assert "Drafts from history" not in write_report(tmp_path / "run").read_text(encoding="utf-8")


def test_a_directory_without_metrics_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err


def test_the_causes_of_the_mismatch_are_drawn_as_areas_beside_their_sample_sizes(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        for step in range(2):
            parts = {"quantisation": 2e-3, "numerics": 1e-4, "stale_1": 3e-4, "speculation": -1e-5, "total": 2.4e-3}
            sizes = {f"rollout_corr/part_ess/{name}": 0.99 for name in ("total", "quantisation", "numerics")}
            of_parts = {f"rollout_corr/part_k3/{name}": value for name, value in parts.items()}
            run.append_metrics(step, of_parts | sizes, ended_s=ORIGIN_S)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert text.count('class="area ') == 3  # the negative part has no area, and the total is their sum
    for name in ("quantisation", "numerics", "stale_1"):
        assert f"</i>{name} <b>" in text


def test_a_step_whose_mismatch_is_not_a_number_leaves_the_report_and_its_other_areas(tmp_path: Path) -> None:
    """Steps with values that are not finite are survived (`actor/skipped_updates`)."""
    steps = [
        {"quantisation": 2e-3, "numerics": 1e-3, "total": 3e-3},
        {"quantisation": math.nan, "numerics": 1e-3, "total": math.nan},
    ]
    with RunDirectory(tmp_path) as run:
        for step, parts in enumerate(steps):
            of_parts = {f"rollout_corr/part_k3/{name}": value for name, value in parts.items()}
            run.append_metrics(step, of_parts, ended_s=ORIGIN_S)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    areas = [re.findall(r"V(\d+)H", path) for path in re.findall(r'class="area s\d" d="([^"]*)"', text)]
    # numerics above quantisation, of which the second step has none; the axis ends at 3e-3
    assert areas == [["0", "667"], ["333", "1000"]]
