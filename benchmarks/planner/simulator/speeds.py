"""Speeds of the simulated engines: from constants or from a record of real forwards, with and without drafts."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.planner.simulator.engines import Speed
from history.drafting.forward_cost import ForwardCostModel

BASE_S, ROW_S, CONTEXT_S = 0.010, 4e-5, 2.7e-8
"""Seconds of an empty forward, per verified token and per token of context; inferred for 7B on one large GPU."""

DRAFTING = Path("benchmarks/results/drafting.json")
REUSE_CASE = "2k, reuse 87 %"
DRAFTERS = {"ours": "ours", "histospec": "HistoSpec, paper"}
"""Names of the methods in the record of `benchmarks.drafting`."""

CONTEXT_TOKENS = 2048
"""Context of each response at which the cost of context is read from a cost model."""


def inferred(num_slots: int, drafter: str = "none") -> Speed:
    """Speed from the constants; drafts are interpolated over the logarithm of the recorded batch sizes."""
    rows = np.arange(num_slots + 1)
    gains, drafts = drafting(num_slots, drafter)
    return Speed(fixed_s=np.asarray(BASE_S + ROW_S * rows * (1 + drafts)), context_s=CONTEXT_S, gains=gains)


def drafting(num_slots: int, drafter: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens gained and draft tokens verified per response and forward; [S + 1] each, by running responses."""
    rows = np.arange(num_slots + 1)
    if drafter == "none":
        return np.ones(len(rows)), np.zeros(len(rows))
    recorded = json.loads(DRAFTING.read_text(encoding="utf-8"))["rows"]
    by_batch = sorted(
        (row["batch"], row["tokens_per_forward"], row["drafted_per_request"])
        for row in recorded
        if "over_no_drafts" in row and row["case"] == REUSE_CASE and row["method"] == DRAFTERS[drafter]
    )
    batches, gains, drafts = (np.log(np.array(column)) for column in zip(*by_batch, strict=True))
    at = np.log(np.maximum(rows, 1))
    return np.exp(np.interp(at, batches, gains)), np.exp(np.interp(at, batches, drafts))


def measured(record: Path, num_slots: int, *, only: Mapping[str, str], drafter: str = "none") -> Speed:
    """Speed from the rows of a record of `benchmarks.rollout.step_time` that have the values `only`.

    Raises:
        ValueError: the file is not such a record, or has no such rows.
    """
    return from_cost_model(ForwardCostModel.load(record, only=only), num_slots, drafter=drafter)


def from_cost_model(
    cost_model: ForwardCostModel, num_slots: int, *, drafter: str = "none", context_tokens: int = CONTEXT_TOKENS
) -> Speed:
    """Speed from a cost model; the cost of context is read where each response has `context_tokens` tokens."""
    gains, drafts = drafting(num_slots, drafter)
    rows = np.maximum(np.arange(num_slots + 1), 1)
    tokens = np.rint(rows * (1 + drafts)).astype(int)
    pairs = list(zip(rows.tolist(), tokens.tolist(), strict=True))
    fixed = np.array([cost_model.seconds(row, token, 0) for row, token in pairs])
    full = np.array([cost_model.seconds(row, token, row * context_tokens) for row, token in pairs])
    context_s = float(np.median((full - fixed)[1:] / (rows[1:] * context_tokens)))
    return Speed(fixed_s=fixed, context_s=max(context_s, 0.0), gains=gains)
