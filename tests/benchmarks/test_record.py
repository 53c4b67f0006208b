"""A record names no place of the machine that made it."""

import pytest

from benchmarks.record import _without_place


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("--rounds", "--rounds"),
        ("2", "2"),
        ("benchmarks/results/a.json", "benchmarks/results/a.json"),
        ("/elsewhere/of/mine/quickstart", "quickstart"),
        ("--warm=/elsewhere/quickstart", "--warm=quickstart"),
        ("HERE/runs/a.json", "runs/a.json"),
        ("--work=HERE/runs", "--work=runs"),
    ],
)
def test_paths_are_recorded_from_here_on_and_others_by_name(argument, recorded, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _without_place(argument.replace("HERE", str(tmp_path))) == recorded
