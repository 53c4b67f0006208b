"""Mathematical equality by `math-verify` (LaTeX and plain expressions, sets, intervals): 1.0 or 0.0.

The library's time limits use signals and threads and are off here: the scorer's limit (`reward.timeout_s`) already
kills a comparison that takes too long.
"""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> dict[str, float]:
    """`score` 1.0 if the final answer equals the ground truth, else 0.0; `parsed` 1.0 if the response has an answer.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    from math_verify import parse, verify

    answer = parse(solution_str, parsing_timeout=None)
    truth = parse(ground_truth, parsing_timeout=None) or parse(f"${ground_truth}$", parsing_timeout=None)
    if not truth:
        raise ValueError(f"ground truth {ground_truth!r} cannot be parsed as mathematics")
    right = bool(answer) and bool(verify(truth, answer, timeout_seconds=None))
    return {"score": float(right), "parsed": float(bool(answer))}
