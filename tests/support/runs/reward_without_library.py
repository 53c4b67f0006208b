"""A reward module whose check of the settings misses a library."""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0


def check_settings(timeout_s, cpu_s):
    raise ModuleNotFoundError("No module named 'verifier'")
