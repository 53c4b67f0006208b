"""The dashboard and the comparison of synthetic runs."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from launcher.cli import main
from launcher.metrics.panels import DASHBOARD
from launcher.metrics.registry import METRICS
from launcher.report.dashboard import CAUSES, _total, read_runs, write_comparison, write_dashboard
from launcher.report.thinning import MAX_POINTS
from launcher.report.write import write_report
from rollout.tracing.timeline import Part


def write_rows(path: Path, *, num_steps: int, config: str) -> Path:
    """A run of steps of 100 s; half of each step is lost to the trainer."""
    path.mkdir()
    rows = [
        {
            "step": step,
            "time_s": 1e9 + 100.0 * (step + 1),
            "timing_s/step": 100.0,
            "reward/mean": step / num_steps,
            "timeline/elapsed_s": 100.0,
            "timeline/bubble": 0.5,
            "timeline/trainer_wait_share": 0.5,
        }
        for step in range(num_steps)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "config.yaml").write_text(config)
    return path


def test_a_comparison_names_differences_and_the_hours_of_each_cause(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a", num_steps=36, config="seed: 1\nengine: {format: int8}\n")
    second = write_rows(tmp_path / "b", num_steps=72, config="seed: 1\nengine: {format: bf16}\n")
    text = write_comparison([first, second], tmp_path / "page.html").read_text()
    assert "engine.format" in text and "&quot;int8&quot;" in text and "&quot;bf16&quot;" in text
    assert ">seed<" not in text, "equal keys are left out"
    # 36 steps x 100 s = 1 hour, 72 steps = 2 hours; half of it is lost
    for cause in ("idle: trainer works", "bubble"):
        cells = re.search(f"<td>{cause}</td>(.*?)</tr>", text)
        assert cells is not None and re.findall(r">([^<>]+)</td>", cells.group(1)) == ["0.500 (50.0%)", "1.000 (50.0%)"]
    assert "Reward over steps" in text and "Reward over hours" in text


def test_hours_begin_with_the_first_step(tmp_path: Path) -> None:
    (run,) = read_runs([write_rows(tmp_path / "a", num_steps=36, config="")])
    line = run.line("reward/mean", label="a", over_hours=True)
    assert line.at[0] == pytest.approx(100 / 3600) and line.at[-1] == pytest.approx(1.0)
    assert list(run.line("reward/mean", label="a", over_hours=False).at) == list(range(1, 37))


def test_hours_are_those_of_the_steps_and_pauses_between_starts_are_named(tmp_path: Path) -> None:
    """Steps of 100 s, an evaluation of 800 s before the second, and a day in a queue before the third."""
    run = tmp_path / "a"
    run.mkdir()
    rows = [
        {"step": 0, "time_s": 1e9, "timing_s/step": 100.0, "timeline/elapsed_s": 100.0},
        {"step": 1, "time_s": 1e9 + 901, "timing_s/step": 100.0, "timeline/elapsed_s": 900.0},
        {"step": 2, "time_s": 1e9 + 87401, "timing_s/step": 100.0, "timeline/elapsed_s": 100.0},
        {"step": 3, "time_s": 1e9 + 80000, "timing_s/step": 100.0},  # the wall clock was set back
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (read,) = read_runs([run])
    line = read.line("timing_s/step", label="a", over_hours=True)
    assert list(line.at) == pytest.approx([100 / 3600, 1000 / 3600, 1100 / 3600, 1200 / 3600])
    other = write_rows(tmp_path / "b", num_steps=3, config="")
    text = write_comparison([run, other], tmp_path / "c.html").read_text()
    assert "a: 4 steps, 0.3 h" in text and "are left out: a 24.0 h.</p>" in text
    assert "are left out" not in write_dashboard([other], tmp_path / "d.html").read_text()


def test_the_causes_of_the_bubble_are_those_of_the_timeline_and_of_the_panel() -> None:
    (causes,) = [panel for panel in DASHBOARD["Where time went"] if panel.title == "Bubble by cause"]
    assert [Part.SATURATED, *CAUSES] == list(Part)
    assert {f"timeline/{cause.value}_share" for cause in CAUSES} == set(causes.metrics)


def test_a_page_opens_no_connection(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "a", num_steps=3, config="")
    (run / "samples").mkdir()
    sample = {"reward": 1.0, "response": '<img src="https://example.org/a.png"><script src=//example.org></script>'}
    (run / "samples" / "step-0.jsonl").write_text(json.dumps(sample) + "\n")
    dashboard, comparison = (
        write_dashboard([run], tmp_path / "d.html"),
        write_comparison([run, run], tmp_path / "c.html"),
    )
    for target in (dashboard, comparison, write_report(run)):
        page = Requests()
        page.feed(target.read_text())
        assert page.policies == [
            "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        ], "the browser refuses whatever the page asks for"
        assert page.found == []


class Requests(HTMLParser):
    """Collects what makes a browser open a connection; links inside the page do not."""

    NAMES = ("src", "href", "srcset", "data", "action", "poster", "background", "ping", "xlink:href")
    TAGS = ("script", "link", "img", "iframe", "object", "embed", "base", "video", "audio", "form")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.policies: list[str] = []
        self.inside_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside_style = tag == "style"
        if tag in self.TAGS:
            self.found.append(tag)
        for name, value in attrs:
            text = value or ""
            is_fetched = name in self.NAMES and not text.startswith("#")
            if is_fetched or name.startswith("on") or "url(" in text or "http:" in text or "https:" in text:
                self.found.append(f"{tag} {name}={text}")
        fields = dict(attrs)
        if fields.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(fields["content"] or "")
        elif fields.get("http-equiv"):
            self.found.append(str(fields))

    def handle_endtag(self, tag: str) -> None:
        self.inside_style = False

    def handle_data(self, data: str) -> None:
        if self.inside_style and re.search(r"url\(|@import|https?:|image-set", data):
            self.found.append(data)


def test_a_page_does_not_grow_with_the_steps_of_a_long_run(tmp_path: Path) -> None:
    short = write_dashboard([write_rows(tmp_path / "a", num_steps=2 * MAX_POINTS, config="")], tmp_path / "a.html")
    long = write_dashboard([write_rows(tmp_path / "b", num_steps=10_000, config="")], tmp_path / "b.html")
    assert long.stat().st_size < 1.1 * short.stat().st_size


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no metrics"):
        write_dashboard([tmp_path], tmp_path / "d.html")


def test_faults_are_shown_as_counts_of_the_run_and_other_metrics_as_last_values(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    restarts = [1, 3, 3, 0, 0, 2]
    rows = [
        {
            "step": step,
            "time_s": 1e9 + step,
            "reward/errors": step % 2,
            "engine/preempted": 80 if step == 1 else 0,
            "history/left_out_segments": 2 - min(step, 2),
            "engine/restarts": restarts[step],
            "engine/serving": 8 - step,
        }
        for step in range(6)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_dashboard([run], tmp_path / "d.html").read_text()
    # per step, over all, engines and nodes
    assert "errors <b>3 in all</b>" in text
    assert "preempted <b>80 in all</b>" in text and "left_out_segments <b>3 in all</b>" in text
    # a total, which the second start of the run counts from 0: three, then two
    assert "restarts <b>5 in all</b>" in text
    assert "serving <b>3</b>" in text


def test_a_total_over_the_run_is_no_count_per_step() -> None:
    one = np.array([1, 1])
    per_step = {metric.reduction for metric in METRICS if _total(metric.name, np.array([1.0, 1.0]), one) == "2 in all"}
    assert "sum" in per_step and "sum over engines" in per_step
    assert _total("guard/actions", np.array([1.0, 1.0]), one) is None


def test_a_start_that_counts_as_much_as_the_one_before_in_its_first_row_is_told_by_its_time(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    restarts = [1, 1, 1, 2, 2, 0]
    rows = [{"step": step, "time_s": 1e9 + 10 * step, "engine/restarts": each} for step, each in enumerate(restarts)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def shown(*begun_s: float | None) -> str:
        starts = [{"commit": "a"} | ({} if each is None else {"time_s": each}) for each in begun_s]
        (run / "environment.json").write_text(json.dumps({**starts[-1], "earlier": starts[:-1]}))
        found = re.search(r"restarts <b>(\d+) in all</b>", write_dashboard([run], tmp_path / "d.html").read_text())
        assert found is not None
        return found[1]

    assert shown(1e9 - 1, 1e9 + 15) == "3", "one before the second start, and two from it on"
    assert shown(1e9 - 1, 1e9 + 15, 1e9 + 25) == "4"
    assert shown(1e9 - 1, 1e9 + 15, 1e9 + 16, 1e9 + 99) == "3", "two starts without a row"
    assert shown(None, 1e9 + 15) == "3" and shown(None, None) == "2", "of earlier versions, which noted no time"


def test_a_part_that_only_later_steps_have_is_stacked_at_those_steps(tmp_path: Path) -> None:
    """A run that samples ahead has stale tokens from its second step on."""
    run = tmp_path / "a"
    run.mkdir()
    prefix = "rollout_corr/part_k3/"
    parts = [{f"{prefix}quantisation": 1.0}, {f"{prefix}quantisation": 1.0, f"{prefix}stale_1": 2.0}, {}]
    rows = [{"step": step, "time_s": 1e9 + step, **of_step} for step, of_step in enumerate(parts)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_dashboard([run], tmp_path / "d.html").read_text()
    figure = re.search(r"<figcaption>k3 by cause.*?</figure>", text)
    assert figure is not None
    areas = [re.findall(r"V(\d+)H(\d+)", path) for path in re.findall(r'class="area s\d" d="([^"]*)"', figure.group(0))]
    # the upper part first; two of the three steps hold a part, and the axis ends at 3
    assert areas == [[("667", "500"), ("0", "1000")], [("667", "500"), ("667", "1000")]]


def test_sections_are_linked_from_the_head_of_the_page(tmp_path: Path) -> None:
    text = write_dashboard([write_rows(tmp_path / "a", num_steps=3, config="")], tmp_path / "d.html").read_text()
    assert (
        re.findall(r'<a href="#(.*?)">', text)
        == re.findall(r'<section id="(.*?)">', text)
        == [
            "learning",
            "where-time-went",
        ]
    )


def test_values_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "a", num_steps=2, config="")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time_s": 1e9 + 300, "reward/mean": "broken", "timing_s/step": 100.0}) + "\n")
    (read,) = read_runs([run])
    assert list(read.line("reward/mean", label="a", over_hours=False).at) == [1, 2]
    assert list(read.line("timing_s/step", label="a", over_hours=False).at) == [1, 2, 3]


def test_the_commands_write_the_pages_and_refuse_what_they_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (write_rows(tmp_path / name, num_steps=3, config="") for name in ("a", "b"))
    page = tmp_path / "page.html"
    assert main(["dashboard", str(first), "--output", str(page)]) == 0
    assert "<h1>Dashboard</h1>" in page.read_text()
    assert main(["report", str(first), str(second), "--output", str(page)]) == 0
    assert "<h1>Comparison of runs</h1>" in page.read_text()
    assert main(["dashboard"]) == 2
    assert "--wandb ENTITY/PROJECT" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert "holds no metrics" in capsys.readouterr().err
