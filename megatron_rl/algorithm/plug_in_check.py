"""Loads the configured functions of one's own, in a process that does nothing else.

    python -m megatron_rl.algorithm.plug_in_check < algorithm.json

Standard input is an `AlgorithmConfig`. The last line of standard output is `{"problems": [...], "needs": {...}}`. A
process of its own keeps what the modules import, and what importing them changes, out of the process that asks.
"""

import json
import sys

from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_config import AlgorithmConfig
from megatron_rl.algorithm_settings import ADVANTAGES, STAGES, ZeroVariance
from megatron_rl.stages import PlugIn


def main() -> int:
    """Prints problems, and the columns that the functions need by the key of their stage."""
    algorithm = AlgorithmConfig.model_validate_json(sys.stdin.read(), strict=True)
    problems: list[str] = []
    needs: dict[str, list[str]] = {}
    for stage in STAGES:
        choice = algorithm.stages[stage.key]
        if not isinstance(choice, PlugIn):
            continue
        try:
            loaded = load_stage(stage, choice)
            needs[stage.key] = sorted(loaded.needs)
            if stage is ADVANTAGES:
                problems += _advantage_problems(choice.name, loaded.inputs, algorithm)
        except ValueError as error:
            problems.append(str(error))
        except Exception as error:  # whatever the user's module raises
            problems.append(f"`{stage.key}` = {choice.name}: importing it failed: {type(error).__name__}: {error}")
    print(json.dumps({"problems": problems, "needs": needs}))
    return 0


def _advantage_problems(name: str, inputs: type, algorithm: AlgorithmConfig) -> list[str]:
    """What the advantage takes decides what it goes together with; `launcher.checks` asks the same of built-in ones."""
    key, problems = f"`{ADVANTAGES.key}` = {name}", []
    if algorithm.kl.place == "reward" and inputs.__name__ != "TokenOutcome":
        problems.append(
            f"`algorithm.kl.place` = reward with {key}: this advantage is computed before the reference policy has "
            "scored a token; let it take a `TokenOutcome`, or set place to loss"
        )
    if algorithm.max_refill and inputs.__name__ == "BatchOutcome":
        problems.append(
            f"`algorithm.max_refill` = {algorithm.max_refill} with {key}: its advantages are known once all groups of "
            "the step are, so none can be judged alone; let it take a `GroupOutcome`, or set max_refill to 0"
        )
    if inputs.__name__ == "TokenOutcome" and isinstance(algorithm.filter, ZeroVariance) and algorithm.group_size < 2:
        problems.append(
            f"`algorithm.group_size` = {algorithm.group_size} with {key} and `algorithm.filter` = zero_variance: the "
            "rewards of a group of one are always equal, so every group would be dropped; set filter to none"
        )
    return problems


if __name__ == "__main__":
    sys.exit(main())
