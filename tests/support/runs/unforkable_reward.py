"""A reward function whose workers die before their first call."""

import os

os.register_at_fork(after_in_child=lambda: os._exit(7))


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
