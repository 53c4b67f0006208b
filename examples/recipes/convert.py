"""Converts DAPO-Math-17k and AIME files to the rows that a run reads, each prompt with its answer once.

    python -m examples.recipes.convert dapo-math-17k.parquet data/dapo-math-17k.jsonl

Two shapes are known, as `.parquet` or `.jsonl`:

* `prompt` (chat messages or text) with `reward_model.ground_truth`, as in BytedTsinghua-SIA/DAPO-Math-17k and verl's
  `aime-2024.parquet`; both repeat every prompt many times.
* `problem` with `answer`, in capitals or not, as in copies of AIME 2024 and 2025. The prompt then asks for the answer
  in a box.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from launcher.run_dir.atomic_files import replace_text
from rollout.data.rows import ground_truth_of, raw_rows, whole_text

ASK = "\n\nReason step by step, and put the final answer into \\boxed{}."


def convert(source: str, *, data_source: str = "") -> tuple[list[dict[str, object]], int]:
    """Rows of a file without repetitions, and the number of its rows.

    Args:
        source: path of the file.
        data_source: name of the data set in rows that have none; empty for the file's name.

    Raises:
        ValueError: a row has neither shape or no ground truth, or the file cannot be read.
    """
    rows: dict[str, dict[str, object]] = {}
    count = 0
    with closing(raw_rows(source)) as raw:
        for where, values in raw:
            count += 1
            row = _row(values, where=where, data_source=data_source or Path(source).stem)
            whole_text(json.dumps(row, ensure_ascii=False, default=str), where=where, column="the row")
            asked = [row[name] for name in ("prompt", "data_source", "ground_truth")]
            rows.setdefault(json.dumps(asked, sort_keys=True, default=str), row)
    if not count:
        raise ValueError(f"{source}: holds no rows")
    return list(rows.values()), count


def _row(values: object, *, where: str, data_source: str) -> dict[str, object]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: a row must have columns, not {values!r}")
    lower = {str(name).lower(): value for name, value in values.items()}
    if "prompt" in lower:
        prompt = lower["prompt"]
    elif "problem" in lower:
        prompt = [{"role": "user", "content": f"{lower['problem']}{ASK}"}]
    else:
        raise ValueError(f"{where}: has columns {', '.join(lower)}, but `prompt` or `problem` is needed")
    return {
        "prompt": prompt,
        "data_source": lower.get("data_source") or data_source,
        "ground_truth": ground_truth_of(lower, where=where),
        "extra_info": lower.get("extra_info"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Convert one file."""
    parser = argparse.ArgumentParser(prog="python -m examples.recipes.convert", description=__doc__.splitlines()[0])
    parser.add_argument("source", help=".parquet or .jsonl file")
    parser.add_argument("target", type=Path, help=".jsonl file to write")
    parser.add_argument("--data-source", default="", help="name for rows without one (default: the file's name)")
    arguments = parser.parse_args(argv)
    try:
        rows, count = convert(arguments.source, data_source=arguments.data_source)
    except ValueError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    arguments.target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    replace_text(arguments.target, "".join(lines))
    print(f"{arguments.target}: {len(rows)} prompts of {count} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
