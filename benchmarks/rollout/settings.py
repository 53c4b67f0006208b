"""Settings of the peers: which are tried, and which is best on responses that the other rows do not use.

Every setting decodes the same turns. The best has the largest geometric mean of its tokens per CPU second over the
batch sizes.
"""

import math
from collections.abc import Mapping, Sequence

from benchmarks.harness.record import Row
from benchmarks.rollout.client import Speculation

TRIED: Mapping[str, Mapping[str, Speculation]] = {
    # three to five tokens of vLLM's documentation, and as many as the product drafts
    "ngram": {
        "2 to 4 tokens, draft 5": {},
        "3 to 5 tokens, draft 5": {"prompt_lookup_min": 3, "prompt_lookup_max": 5},
        "5 tokens, draft 16": {"prompt_lookup_min": 5, "prompt_lookup_max": 5, "num_speculative_tokens": 16},
        "3 to 5 tokens, draft 16": {"prompt_lookup_min": 3, "prompt_lookup_max": 5, "num_speculative_tokens": 16},
    },
    "suffix": {
        "factor 1": {},
        "factor 2": {"suffix_decoding_max_spec_factor": 2.0},
        "factor 4": {"suffix_decoding_max_spec_factor": 4.0},
        "factor 2, p 0.3": {"suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.3},
    },
}
"""Tried settings of methods that have any. The first changes nothing of `benchmarks.rollout.server.SPECULATIONS`:
vLLM's documentation for `ngram`, vLLM's defaults for `suffix` with drafts that are no longer than the product's."""


def rounds_of_settings(methods: Sequence[str]) -> list[dict[str, str]]:
    """Settings by method for each start of engines; a method with fewer settings takes part in the first starts."""
    tried = {method: list(TRIED[method]) for method in methods if method in TRIED}
    most = max(map(len, tried.values()), default=0)
    return [{method: names[number] for method, names in tried.items() if number < len(names)} for number in range(most)]


def speculations(names: Mapping[str, str]) -> dict[str, Speculation]:
    """The fields of named settings, by method."""
    return {method: TRIED[method][name] for method, name in names.items()}


def best_settings(rows: Sequence[Row]) -> dict[str, str]:
    """Name of the best setting of each method that has calibration rows."""
    rates: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if is_calibration(row):
            of_method = rates.setdefault(str(row["method"]), {})
            of_method.setdefault(str(row["setting"]), []).append(math.log(float(row["tokens_per_cpu_s"])))
    return {
        method: max(of_method, key=lambda name: sum(of_method[name]) / len(of_method[name]))
        for method, of_method in rates.items()
    }


def is_calibration(row: Row) -> bool:
    """Whether a row chooses settings."""
    return row.get("history") == CALIBRATION


CALIBRATION = "calibration"
"""History of rows that choose settings: 87 % reuse of other prompts."""
