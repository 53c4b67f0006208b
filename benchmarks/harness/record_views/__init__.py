"""Question, answer, notes and tables of each record's page: one entry for each record, made or still to be made."""

from collections.abc import Mapping

from benchmarks.harness.record_views import (
    control_plane,
    drafting,
    end_to_end,
    faults,
    learning,
    planning,
    publishing,
    rehearsal,
    report,
    rollout,
    saves,
)
from benchmarks.harness.record_views.view import View

VIEWS: Mapping[str, View] = {
    "algorithms": learning.ALGORITHMS,
    "at_scale": planning.AT_SCALE,
    "control_plane": control_plane.CONTROL_PLANE,
    "draft_trees": drafting.DRAFT_TREES,
    "drafting": drafting.DRAFTING,
    "end_to_end": end_to_end.END_TO_END,
    "fault_soak": faults.FAULT_SOAK,
    "faults": faults.FAULTS,
    "guard": learning.GUARD,
    "history_example": drafting.HISTORY_EXAMPLE,
    "history_soak": drafting.HISTORY_SOAK,
    "mismatch": learning.MISMATCH,
    "packing": planning.PACKING,
    "planner": planning.PLANNER,
    "planner_engines": planning.PLANNER_ENGINES,
    "publish": publishing.PUBLISH,
    "publish_delta": publishing.PUBLISH_DELTA,
    "publish_over_nodes": publishing.PUBLISH_OVER_NODES,
    "quickstart": learning.QUICKSTART,
    "rehearsal": rehearsal.REHEARSAL,
    "report": report.REPORT,
    "rollout": rollout.ROLLOUT,
    "sampling": rollout.SAMPLING,
    "saves": saves.SAVES,
    "soak": learning.SOAK,
    "step_time": rollout.STEP_TIME,
}
