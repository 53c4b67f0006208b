"""Makes the peers' virtual environments, one each, from lock files.

`python -m benchmarks.end_to_end.peers --setup DIR [--python python3.11]`. torch is installed first, with its
dependencies, so that the build for CPUs is the choice of the package index; then come the pinned packages.
"""

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

PEERS = ("plain_loop", "trl_grpo")
TORCH = "torch==2.13.0"
_LOCKS = Path(__file__).parent


def python_of(directory: Path, peer: str) -> Path:
    """The interpreter of a peer's environment."""
    return directory.absolute() / peer / "bin" / "python"


def set_up(directory: Path, python: str) -> None:
    """Make all environments in `directory`. CalledProcessError: a command failed."""
    for peer in PEERS:
        subprocess.run([python, "-m", "venv", str(directory / peer)], check=True)
        install = [str(python_of(directory, peer)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, TORCH], check=True)
        subprocess.run([*install, "--no-deps", "-r", str(_LOCKS / f"{peer}.txt")], check=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make the virtual environments of the end-to-end benchmark's peers.")
    parser.add_argument("--setup", type=Path, required=True, metavar="DIR", help="where the environments are made")
    parser.add_argument("--python", default="python3.11", help="interpreter that they are made of")
    options = parser.parse_args(argv)
    set_up(options.setup, options.python)
    return 0
