"""The reward function on the first rows of the data: it returns finite numbers within its time limit.

Each row is scored twice, with its ground truth and with an empty text as the response. Equal means of the two are
shown and not judged: many rewards ask for a form that the bare ground truth lacks.
"""

from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError

from pebble import ProcessExpired, ProcessPool

from rollout.config import RewardConfig
from rollout.data.rows import PromptRow
from rollout.rewards.call import RewardOutcome, RewardRequest, begin_worker, call_reward, check_reward


def reward_line(config: RewardConfig, rows: Sequence[PromptRow]) -> tuple[str, list[str]]:
    """Value and problems.

    Raises:
        ValueError: the reward function cannot be imported, or cannot work on this machine.
    """
    check_reward(config.function, timeout_s=config.timeout_s)
    problems: list[str] = []
    means = []
    with ProcessPool(
        max_workers=1, initializer=begin_worker, initargs=(config.function, config.memory_bytes, config.max_file_bytes)
    ) as workers:
        for kind in ("ground truth", "empty text"):
            rewards = []
            for row in rows:
                request = RewardRequest(
                    function=config.function,
                    data_source=row.data_source,
                    solution_str=row.ground_truth if kind == "ground truth" else "",
                    ground_truth=row.ground_truth,
                    extra_info_json=row.extra_info_json,
                )
                try:
                    outcome = workers.schedule(call_reward, args=(request,), timeout=config.timeout_s).result()
                except FutureTimeoutError:
                    outcome = RewardOutcome(error=f"takes longer than `reward.timeout_s` = {config.timeout_s} s")
                except ProcessExpired as error:
                    outcome = RewardOutcome(error=f"ends its process: {error}")
                rewards.append(outcome.reward)
                if fault := outcome.misuse or outcome.error:
                    problems.append(f"{row.where}, {kind} as the response: {fault}; mend {config.function}")
            means.append(f"{kind} {sum(rewards) / len(rewards):.2f}")
    return f"mean of {len(rows)} rows: {', '.join(means)}", problems[:1]
