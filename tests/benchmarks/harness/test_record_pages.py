"""Record pages equal the pages generated from records; every row of a record is in one of its tables."""

import re
import statistics

import pytest

from benchmarks.harness import record_pages
from benchmarks.harness.record import main
from benchmarks.harness.record_answers import Answer, goal, median
from benchmarks.harness.record_commands import of_today
from benchmarks.harness.record_file import ROOT, Record, read_all
from benchmarks.harness.record_pages import PAGES, pages
from benchmarks.harness.record_tables import Column, Table, number, shown
from benchmarks.harness.record_views import VIEWS


def test_committed_pages_equal_the_generated_ones() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    wanted = record_pages.generated()
    old = sorted(name for name in committed.keys() | wanted.keys() if committed.get(name) != wanted.get(name))
    assert old == [], "run `python -m benchmarks.record --docs`"


@pytest.mark.parametrize("record", read_all(), ids=lambda record: record.name)
def test_every_row_is_in_a_table_and_every_table_has_rows(record: Record) -> None:
    tables = VIEWS[record.name].tables
    assert [row for row in record.rows if not any(table.selects(row) for table in tables)] == []
    empty = [table for table in tables if not any(table.selects(row) for row in record.rows)]
    assert [table.title for table in empty if not table.may_be_empty] == []


@pytest.mark.parametrize("record", read_all(), ids=lambda record: record.name)
def test_a_page_begins_with_its_question_and_an_answer_in_one_short_sentence(record: Record) -> None:
    view = VIEWS[record.name]
    page = pages([record], {record.name: view})[f"{record.name}.md"]
    answer = view.answer.of(record)
    assert view.question.endswith("?") and answer.endswith(".")
    assert len(answer.split()) <= 30
    assert page.index(view.question) < page.index(answer) < page.index("**Command:**") < page.index("**Not measured:**")


def test_commands_of_pages_name_modules_of_today() -> None:
    commands = [record.command for record in read_all()]
    commands += [given.command for record in read_all() for given in record.inputs]
    modules = {of_today(command).partition(" -m ")[2].partition(" ")[0] for command in commands}
    paths = {module: ROOT.joinpath(*module.split(".")) for module in modules}
    known = {
        name for name, path in paths.items() if path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    }
    assert modules - known == set(), "add the new name to benchmarks.harness.record_commands.MOVED"


def test_an_answer_needs_the_goals_and_rows_that_it_names() -> None:
    (record,) = [record for record in read_all() if record.name == "soak"]
    assert Answer(text="{n} steps.", figures={"n": goal("steps")}).of(record) == "200 steps."
    assert median("num_processes", {})(record) == statistics.median(int(row["num_processes"]) for row in record.rows)
    with pytest.raises(ValueError, match="has 0 goals 'speed'"):
        goal("speed")(record)
    with pytest.raises(ValueError, match="no row with 'num_fds'"):
        median("num_fds", {"format": ("int8",)})(record)


def test_links_of_pages_resolve() -> None:
    links = {
        (page.name, target)
        for page in PAGES.glob("*.md")
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {link for link in links if not (PAGES / link[1]).is_file()} == set()


def test_check_names_the_page_that_differs_and_writes_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(record_pages, "PAGES", tmp_path)
    assert main(["--docs"]) == 0
    assert main(["--docs", "--check"]) == 0
    (tmp_path / "soak.md").write_text("memory is flat\n")
    (tmp_path / "stray.md").write_text("of no record\n")
    assert main(["--docs", "--check"]) == 1
    assert "soak.md, stray.md" in capsys.readouterr().out
    assert (tmp_path / "soak.md").read_text() == "memory is flat\n"
    assert main(["--docs"]) == 0
    assert not (tmp_path / "stray.md").exists()


def test_a_record_without_a_view_is_named() -> None:
    with pytest.raises(ValueError, match="no view of soak"):
        pages(read_all(), {name: view for name, view in VIEWS.items() if name != "soak"})


def test_a_view_without_a_record_is_listed_in_the_index() -> None:
    records = [record for record in read_all() if record.name != "soak"]
    assert f"* soak: {VIEWS['soak'].question}" in pages(records)["index.md"]


ROWS = [
    {"method": "ours", "batch": 8, "s": 0.010, "kept": True},
    {"method": "ours", "batch": 8, "s": 0.030},
    {"method": "ours", "batch": 1, "s": 0.002},
    {"method": "peer", "batch": 8, "s": 0.5},
    {"method": "other", "batch": 8, "s": float("nan")},
]


def test_a_table_has_medians_and_a_column_for_each_value_of_the_pivot_field() -> None:
    table = Table(
        title="",
        lines={"method": "method"},
        across="batch",
        columns=(Column(field="s", title="ms", scale=1e3),),
        without={"method": ("other",)},
    )
    assert list(table.markdown(ROWS)) == [
        "| method | 1 | 8 |",
        "| --- | --- | --- |",
        "| ours | 2 | 20 |",
        "| peer | - | 500 |",
    ]


def test_a_table_selects_rows_with_the_requested_fields_and_values() -> None:
    columns = (Column(field="s", title="s", reduce="least"), Column(field="s", title="most", reduce="most"))
    table = Table(title="", lines={}, where={"kept": (True,)}, columns=columns)
    assert [table.selects(row) for row in ROWS] == [True, False, False, False, False]
    assert list(table.markdown(ROWS))[-1] == "| 0.01 | 0.01 |"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1107439200, "1,107,439,200"),
        (65536, "65,536"),
        (1234.5, "1,234"),
        (0.79881, "0.799"),
        (0.0000432, "4.32e-5"),
        (0, "0"),
    ],
)
def test_numbers_are_short_and_have_no_needless_exponent(value, text) -> None:
    assert number(value, digits=3) == text


def test_other_values_are_words() -> None:
    assert [shown(value) for value in (True, False, "TP2", float("nan"))] == ["yes", "no", "TP2", "-"]
