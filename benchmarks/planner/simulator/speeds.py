"""What forwards of the simulated engines cost: constants, or a record of real ones; and what drafts make of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.planner.simulator.engines import Speed
from history.drafting.forward_cost import ForwardCostModel

BASE_S, ROW_S, CONTEXT_S = 0.010, 4e-5, 2.7e-8
"""An empty forward, each token verified in it, each token of context: inferred for a 7B model on one large GPU."""

DRAFTING = Path("benchmarks/results/drafting.json")
REUSE_CASE = "2k, reuse 87 %"
DRAFTERS = {"ours": "ours", "histospec": "HistoSpec, paper"}
"""Methods of the drafting benchmark."""

CONTEXT_TOKENS = 2048
"""Of each response, where the price of context is read off a surface."""


def inferred(num_slots: int, drafter: str = "none") -> Speed:
    """By the constants; with drafts, between the recorded batches by the batch's logarithm."""
    rows = np.arange(num_slots + 1)
    gains, drafts = drafting(num_slots, drafter)
    return Speed(fixed_s=np.asarray(BASE_S + ROW_S * rows * (1 + drafts)), context_s=CONTEXT_S, gains=gains)


def drafting(num_slots: int, drafter: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens gained and drafts verified by a response in a forward of so many, [S + 1] each."""
    rows = np.arange(num_slots + 1)
    if drafter == "none":
        return np.ones(len(rows)), np.zeros(len(rows))
    recorded = json.loads(DRAFTING.read_text(encoding="utf-8"))["rows"]
    found = sorted(
        (row["batch"], row["tokens_per_forward"], row["drafted_per_request"])
        for row in recorded
        if "over_no_drafts" in row and row["case"] == REUSE_CASE and row["method"] == DRAFTERS[drafter]
    )
    batches, gains, drafts = (np.log(np.array(column)) for column in zip(*found, strict=True))
    at = np.log(np.maximum(rows, 1))
    return np.exp(np.interp(at, batches, gains)), np.exp(np.interp(at, batches, drafts))


def measured(record: Path, num_slots: int, *, only: Mapping[str, str], drafter: str = "none") -> Speed:
    """By a record of `benchmarks.rollout.step_time`, of whose rows those with the fields `only` are taken.

    Raises:
        ValueError: the file is no such record, or has no such rows.
    """
    return of_surface(ForwardCostModel.load(record, only=only), num_slots, drafter=drafter)


def of_surface(
    surface: ForwardCostModel, num_slots: int, *, drafter: str = "none", context_tokens: int = CONTEXT_TOKENS
) -> Speed:
    """By a surface; the price of context is read off where each response has `context_tokens` of it."""
    gains, drafts = drafting(num_slots, drafter)
    rows = np.maximum(np.arange(num_slots + 1), 1)
    tokens = np.rint(rows * (1 + drafts)).astype(int)
    pairs = list(zip(rows.tolist(), tokens.tolist(), strict=True))
    fixed = np.array([surface.seconds(row, token, 0) for row, token in pairs])
    full = np.array([surface.seconds(row, token, row * context_tokens) for row, token in pairs])
    context_s = float(np.median((full - fixed)[1:] / (rows[1:] * context_tokens)))
    return Speed(fixed_s=fixed, context_s=max(context_s, 0.0), gains=gains)
