"""Reward functions; each module has a `compute_score(data_source, solution_str, ground_truth, extra_info)`."""
