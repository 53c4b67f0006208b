"""Files `step-N.jsonl` in `samples/` and `traces/`. Files of other names are a person's, and are left alone."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(0|[1-9][0-9]*)\.jsonl")


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of each file, ascending."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.glob("step-*.jsonl")]
    return sorted((int(name[1]), path) for name, path in found if name)
