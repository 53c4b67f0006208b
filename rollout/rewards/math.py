"""Mathematical equality by `math-verify`: LaTeX and plain expressions, sets, intervals, 1.0 or 0.0.

The library's own time limits use signals and threads, which do not belong into a worker that is already watched:
they are off here, and the scorer's limit (`reward.timeout_s`) kills a comparison that runs away.
"""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 when the final answer equals the ground truth, else 0.0; `parsed` 1.0 when one was found."""
    from math_verify import parse, verify

    answer = parse(solution_str, parsing_timeout=None)
    truth = parse(ground_truth, parsing_timeout=None) or parse(f"${ground_truth}$", parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground truth {ground_truth!r} cannot be parsed as mathematics")
    right = bool(answer) and bool(verify(truth, answer, timeout_seconds=None))
    return {"score": float(right), "parsed": float(bool(answer))}
