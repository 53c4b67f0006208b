"""The reward function on the first rows of the data: it returns finite numbers within its time limit.

Each row is scored twice, with its ground truth and with an empty text as the response. Equal means of the two are
shown and not judged: many rewards ask for a form that the bare ground truth lacks.
"""

import asyncio
from collections.abc import Sequence

from launcher.checks.health.reward_environment import unset_problems
from rollout.config import RewardConfig
from rollout.data.rows import PromptRow
from rollout.rewards.call import RewardOutcome, RewardRequest
from rollout.rewards.workers import RewardWorkers

KINDS = ("ground truth", "empty text")
"""What stands for the response."""


def reward_line(config: RewardConfig, rows: Sequence[PromptRow]) -> tuple[str, list[str]]:
    """Value and problems. The function is not called without the variables that it needs.

    Raises:
        ValueError: the reward function cannot be imported, or cannot work on this machine.
        RewardBrokenError: the function's module fails while it is imported.
    """
    if unset := unset_problems(config):
        return "not called", unset
    outcomes = asyncio.run(_outcomes(config, rows))
    problems: list[str] = []
    means = []
    for kind in KINDS:
        rewards = [outcomes[kind, number].reward for number in range(len(rows))]
        for number, row in enumerate(rows):
            outcome = outcomes[kind, number]
            fault = outcome.misuse or outcome.error
            late = f"takes longer than `reward.timeout_s` = {config.timeout_s} s or `reward.cpu_s` = {config.cpu_s} s"
            if fault:
                shown = late if outcome.is_late else fault
                problems.append(f"{row.where}, {kind} as the response: {shown}; mend {config.function}")
        means.append(f"{kind} {sum(rewards) / len(rewards):.2f}")
    return f"mean of {len(rows)} rows: {', '.join(means)}", problems[:1]


async def _outcomes(config: RewardConfig, rows: Sequence[PromptRow]) -> dict[tuple[str, int], RewardOutcome]:
    """Outcome of each row, by kind of response and number of the row."""
    requests = {
        (kind, number): RewardRequest(
            function=config.function,
            data_source=row.data_source,
            solution_str=row.ground_truth if kind == "ground truth" else "",
            ground_truth=row.ground_truth,
            extra_info_json=row.extra_info_json,
        )
        for kind in KINDS
        for number, row in enumerate(rows)
    }
    workers = RewardWorkers(config)
    try:
        await workers.start()
        outcomes = await asyncio.gather(*map(workers.submit, requests.values()))
    finally:
        await workers.close()
    return dict(zip(requests, outcomes, strict=True))
