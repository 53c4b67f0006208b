"""The page of the record of opening a large run."""

from benchmarks.harness.record_answers import Answer, goal
from benchmarks.harness.record_tables import Column, Table
from benchmarks.harness.record_views.view import View

REPORT = View(
    question="How long does it take to open the pages of a run of 10,000 steps and 64 engines?",
    answer=Answer(
        text="The dashboard is open after {dashboard} s, the report after {report} s.",
        figures={name: goal(f"{name} of 10,000 steps and 64 engines is open") for name in ("dashboard", "report")},
    ),
    notes=(
        "The run directories are invented: rows hold every metric of the registry, and the files of forwards exceed "
        "what a report reads.",
        "A page is open when its command has written it and a browser that already runs has painted it. The start of "
        "the browser is that of an empty page.",
        "A report's command goes on to write `timeline.json` after its page.",
        "The comparison is of three such runs.",
        "Tests ran on the machine at the same time; the benchmark had a higher priority than they.",
    ),
    tables=(
        Table(
            title="Seconds and size by page, medians",
            lines={"page": "page"},
            columns=(
                Column(field="page_s", title="until the page is written, s"),
                Column(field="command_s", title="whole command, s"),
                Column(field="cpu_s", title="CPU time of the command, s"),
                Column(field="browser_s", title="a fresh browser, from start to picture, s"),
                Column(field="page_bytes", title="page, kB", scale=1e-3),
            ),
        ),
    ),
)
