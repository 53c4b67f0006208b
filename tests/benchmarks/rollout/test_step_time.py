"""Arithmetic of models and memory, and drafts of the requested lengths."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.rollout import step_time
from benchmarks.rollout.scripted_proposer import ScriptedDrafter
from benchmarks.rollout.step_time import CUDA_GRID, CUDA_SHAPES, SMALL, Case, Grid, _run_case, patterns
from history.drafting.forward_cost import ForwardCostModel


@pytest.mark.parametrize(("name", "billions"), [("7B", 7.6), ("14B", 14.8), ("32B", 32.8)])
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert CUDA_SHAPES[name].weight_bytes("bf16") == pytest.approx(2e9 * billions, rel=0.01)
    assert 0.5 < CUDA_SHAPES[name].weight_bytes("int8") / CUDA_SHAPES[name].weight_bytes("bf16") < 0.6


def test_bytes_of_keys_and_values_follow_from_the_heads() -> None:
    assert CUDA_SHAPES["7B"].kv_bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert SMALL.kv_bytes_per_token == 2 * 12 * 4 * 64 * 2


def test_a_32b_model_in_bf16_leaves_little_of_80_gb_and_in_int8_much() -> None:
    bf16, int8 = (
        Case(model="32B", format=format, drafts=False, device="cuda", quick=False) for format in ("bf16", "int8")
    )
    assert 10_000 < bf16.kv_tokens < 30_000
    assert 100_000 < int8.kv_tokens < 160_000
    assert int8.saturated_rows > 4 * bf16.saturated_rows > 0
    assert max(batch for batch, _ in CUDA_GRID.cells(bf16.kv_tokens)) < 64


def test_only_batches_that_fit_are_measured() -> None:
    grid = Grid(batches=(1, 64), contexts=(100, 10_000))
    assert grid.cells(50_000) == [(1, 100), (64, 100), (1, 10_000)]


def test_rows_get_the_draft_lengths_in_turn() -> None:
    drafter = ScriptedDrafter()
    drafter.lengths = (0, 2, 5)
    slots, rooms = np.array([0, 0, 0, -1, 0]), np.array([9, 9, 3, 9, 9], dtype=np.int32)
    drafts = drafter.propose(slots, np.zeros((5, 4), dtype=np.int32), np.full(5, 4, dtype=np.int32), rooms)
    assert [len(draft) for draft in drafts] == [0, 2, 3, 0, 2]


def test_uniform_and_ragged_patterns_are_both_measured() -> None:
    assert {name for name, _ in patterns(1)} == {"uniform"}
    kinds = patterns(4)
    assert {name for name, _ in kinds} == {"uniform", "ragged"}
    assert all((len(set(lengths)) == 1) == (name == "uniform") for name, lengths in kinds)


@pytest.mark.slow
@pytest.mark.bench
def test_an_engine_verifies_drafts_of_all_lengths(tmp_path: Path) -> None:
    rows = _run_case(Case(model="tiny", format="bf16", drafts=True, device="cpu", quick=True), tmp_path)
    verified = {(row["num_rows"], row["num_tokens"]) for row in rows}
    assert {(1, 1), (1, 17), (4, 4), (4, 68)} <= verified
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert ForwardCostModel.load(tmp_path / "record.json", only={"engine": "drafts"}).seconds(4, 68) > 0


def test_an_engine_that_failed_is_named_and_ends_the_benchmark_with_an_error(tmp_path: Path, monkeypatch) -> None:
    point = {"num_rows": 1, "num_tokens": 1, "seconds": 0.1}
    monkeypatch.setattr(step_time, "_run_case", lambda case, work: [] if case.drafts else [point])
    record = tmp_path / "record.json"
    command = [f"--json={record}", "--quick", f"--work={tmp_path}"]
    assert step_time.main(command) == 1
    found = json.loads(record.read_text(encoding="utf-8"))
    assert [{key: row[key] for key in point} for row in found["rows"]] == [point]
    assert any("drafts=True" in line and "failed" in line for line in found["not_measured"])
    monkeypatch.setattr(step_time, "_run_case", lambda case, work: [point])
    assert step_time.main(command) == 0
