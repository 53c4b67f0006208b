import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from history.drafting.stats import SOURCES, DraftStats
from launcher.config.loading import resolved_yaml
from launcher.config.schema import RunConfig
from launcher.report.run_timeline import Step
from launcher.report.timeline_section import last_steps
from launcher.report.write import main, write_report
from launcher.run_dir.atomic_files import replace_rows
from launcher.run_dir.directory import RunDirectory
from megatron_rl.weights.quantization_stats import QuantizationStats, code_metrics
from rollout.evaluation import EvaluationRow
from tests.support.runs.synthetic_run import NUM_ENGINES, write_run

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


def test_charts_without_recorded_metrics_are_left_out(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, {"reward/mean": 0.5})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert text.count("<svg") == 1
    assert "Evaluation" not in text


def test_drafts_have_their_own_charts(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.append_metrics(0, DraftStats(num_forwards=4, num_rows=10, num_emitted=10).metrics())
        found = DraftStats(
            num_rows=10, num_emitted=23, num_drafted=20, num_accepted=13, accepted_by_source=(9, 2, 1, 1)
        ).metrics()
        seen = {"history/reusable_share": 0.8, "history/length_rank_correlation": 0.7}
        run.append_metrics(1, {**found, **seen, "history/saved_s_measured": 2.0})
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
            run.append_metrics(step, {**times, **code_metrics(layers)})
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
            run.append_metrics(step, {f"rollout_corr/part_k3/{name}": value for name, value in parts.items()} | sizes)
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
            run.append_metrics(step, {f"rollout_corr/part_k3/{name}": value for name, value in parts.items()})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    areas = [re.findall(r"V(\d+)H", path) for path in re.findall(r'class="area s\d" d="([^"]*)"', text)]
    # numerics above quantisation, of which the second step has none; the axis ends at 3e-3
    assert areas == [["0", "667"], ["333", "1000"]]
