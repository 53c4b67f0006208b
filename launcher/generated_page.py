"""The command of a page that is generated from code: it prints the page, or writes the page of this checkout."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def print_or_write(module: str, page: Path, generate: Callable[[], str], argv: Sequence[str] | None) -> int:
    """Runs `python -m MODULE [--write]`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Generates {page.name}.")
    parser.add_argument("--write", action="store_true", help=f"write {page.name} of this checkout")
    if parser.parse_args(argv).write:
        page.write_text(generate(), encoding="utf-8")
    else:
        sys.stdout.write(generate())
    return 0
