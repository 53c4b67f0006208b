"""A reward module with a mistake that shows when it is imported."""

POINTS = {"right": 1.0}["wrong"]


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return POINTS
