"""Responses with long-tailed lengths, and forecasts with a chosen correlation with them."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from history.lengths.book import LengthBook
from history.store.traces import Trace
from history.types import prompt_key

SIGMA, MEAN_TOKENS, MAX_TOKENS = 0.9, 6000.0, 32768.0
"""Parameters of the lognormal distribution of lengths; lengths above MAX_TOKENS are cut."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Groups of several steps; group p belongs to step p // groups_per_step."""

    lengths: _Floats
    """[P, G] tokens."""
    forecasts: _Floats
    """[P] expected tokens of each response of a group."""
    groups_per_step: int

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return len(self.lengths) // self.groups_per_step


def draw(
    seed: int,
    *,
    num_steps: int,
    groups_per_step: int,
    group_size: int,
    prompt_share: float,
    prompt_correlation: float,
) -> Workload:
    """Lognormal lengths with variance SIGMA^2 of their logarithms, and forecasts of them.

    A share `prompt_share` of that variance is common to the responses of a prompt. The forecast knows this common part
    with correlation `prompt_correlation`. With groups of one and a share of 1, that is the correlation for each
    response.
    """
    rng = np.random.default_rng(seed)
    num_groups = num_steps * groups_per_step
    of_prompt = rng.standard_normal(num_groups)
    of_response = rng.standard_normal((num_groups, group_size))
    noise = rng.standard_normal(num_groups)
    known = prompt_correlation * of_prompt + np.sqrt(1 - prompt_correlation**2) * noise
    deviations = np.sqrt(prompt_share) * of_prompt[:, None] + np.sqrt(1 - prompt_share) * of_response
    median = MEAN_TOKENS / np.exp(SIGMA**2 / 2)
    return Workload(
        lengths=np.clip(np.round(median * np.exp(SIGMA * deviations)), 1.0, MAX_TOKENS),
        # the forecast is the median of what is known: the unknown part of the prompt counts as noise of the response
        forecasts=np.minimum(median * np.exp(SIGMA * np.sqrt(prompt_share) * prompt_correlation * known), MAX_TOKENS),
        groups_per_step=groups_per_step,
    )


def single_responses(workload: Workload) -> Workload:
    """The same responses as groups of one."""
    group_size = workload.lengths.shape[1]
    return Workload(
        lengths=workload.lengths.reshape(-1, 1),
        forecasts=np.repeat(workload.forecasts, group_size),
        groups_per_step=workload.groups_per_step * group_size,
    )


def replayed(traces: Iterable[Trace]) -> Workload:
    """Recorded responses by step, with the forecasts that a run would have made.

    Steps whose number of groups or group size differs from the first step's are left out. A prompt that a step has
    twice, because an epoch ends amid the step, has two groups there.

    Raises:
        ValueError: there are no traces.
    """
    steps: defaultdict[int, defaultdict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    seen = Counter[tuple[int, str, int]]()
    for trace in traces:
        sample = (trace.step, trace.prompt_id, trace.sample)
        steps[trace.step][trace.prompt_id, seen[sample]].append(max(len(trace.response_ids), 1))
        seen[sample] += 1
    if not steps:
        raise ValueError("there are no traces to replay")
    first = steps[min(steps)]
    shape = (len(first), len(next(iter(first.values()))))
    book, lengths, forecasts = LengthBook(), list[list[int]](), list[float]()
    for step in sorted(steps):
        groups = steps[step]
        if len(groups) != shape[0] or any(len(group) != shape[1] for group in groups.values()):
            continue
        forecasts += [book.expected(prompt_key(prompt_id)) for prompt_id, _ in groups]
        lengths += groups.values()
        for (prompt_id, _), group in groups.items():
            book.observe(prompt_key(prompt_id), step, group)
    return Workload(
        lengths=np.array(lengths, dtype=np.float64), forecasts=np.array(forecasts), groups_per_step=shape[0]
    )
