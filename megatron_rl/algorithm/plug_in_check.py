"""Loads the configured functions of one's own, in a process that does nothing else.

    python -m megatron_rl.algorithm.plug_in_check < algorithm.json

Standard input is an `AlgorithmConfig`. The last line of standard output is `{"problems": [...], "needs": {...}}`. A
process of its own keeps what the modules import, and what importing them changes, out of the process that asks.
"""

import json
import sys

from megatron_rl.algorithm.plug_in import load_stage
from megatron_rl.algorithm_config import AlgorithmConfig
from megatron_rl.algorithm_settings import ADVANTAGES, STAGES
from megatron_rl.stages import PlugIn, Stage


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
            problems += _place_problem(stage, choice.name, loaded.inputs, algorithm)
        except ValueError as error:
            problems.append(str(error))
        except Exception as error:  # whatever the user's module raises
            problems.append(f"`{stage.key}` = {choice.name}: importing it failed: {type(error).__name__}: {error}")
    print(json.dumps({"problems": problems, "needs": needs}))
    return 0


def _place_problem(stage: Stage, name: str, inputs: type, algorithm: AlgorithmConfig) -> list[str]:
    """A divergence in the reward of tokens needs an advantage of tokens."""
    if stage is not ADVANTAGES or algorithm.kl.place != "reward" or inputs.__name__ == "TokenOutcome":
        return []
    return [
        f"`algorithm.kl.place` = reward with `{stage.key}` = {name}: this advantage is computed before the reference "
        "policy has scored a token; let it take a `TokenOutcome`, or set place to loss"
    ]


if __name__ == "__main__":
    sys.exit(main())
