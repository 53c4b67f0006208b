"""Weights & Biases: the package, and for `online` a key. No connection is opened."""

import netrc
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from launcher.config.schema import WandbConfig

HOST = "api.wandb.ai"


def wandb_line(
    config: WandbConfig, *, environment: Mapping[str, str], netrc_file: Path, is_installed: bool
) -> tuple[str, list[str]]:
    """Value and problems. Reads `netrc_file`, to which `wandb login` writes."""
    if config.mode == "disabled":
        return "disabled", []
    if not is_installed:
        return config.mode, ["the package wandb is missing; install it or set `wandb.mode` = disabled"]
    if config.mode == "online" and not environment.get("WANDB_API_KEY") and not _has_login(environment, netrc_file):
        return config.mode, ["no key; set WANDB_API_KEY, run `wandb login`, or set `wandb.mode` = offline"]
    return config.mode, []


def is_wandb_installed() -> bool:
    """Whether the package can be imported."""
    return find_spec("wandb") is not None


def _has_login(environment: Mapping[str, str], netrc_file: Path) -> bool:
    host = environment.get("WANDB_BASE_URL", f"https://{HOST}").partition("://")[2].partition("/")[0]
    try:
        return netrc.netrc(netrc_file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
