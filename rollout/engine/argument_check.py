"""Checks the `vllm` table of engines, in a process that does nothing else.

    python -m rollout.engine.argument_check < table.json

Standard input is `engine.vllm`. The last line of standard output is a list of problems. A process of its own keeps vLLM
and torch out of the process that asks.
"""

import json
import sys

from rollout.engine.vllm_args import check_passthrough


def main() -> int:
    """Prints a problem for each key that vLLM does not know or that this program sets."""
    table: dict[str, str | int | float | bool] = json.loads(sys.stdin.read())
    problems = []
    for key, value in table.items():
        try:
            check_passthrough({key: value})
        except ValueError as error:
            problems.append(str(error))
    print(json.dumps(problems))
    return 0


if __name__ == "__main__":
    sys.exit(main())
