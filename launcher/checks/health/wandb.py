"""Weights & Biases: the package, and for `online` a key. No connection is opened, and wandb is not imported.

The doctor shows it as a line. `run` and `slurm` refuse a run that wandb would refuse after engines and trainer have
loaded. A key is looked for wherever wandb looks, because a run that has one must not be refused.
"""

import configparser
import netrc
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from launcher.checks.health.reward_environment import brings_variables
from launcher.cluster.slurm_script import ALWAYS_EXPORTED
from launcher.config.schema import WandbConfig
from launcher.config.slurm import SlurmConfig

HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Servers of Weights & Biases; the version of the package decides which one `wandb login` writes down."""
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
PLACES = ("WANDB_BASE_URL", "WANDB_CONFIG_DIR", "WANDB_DIR", "NETRC")
"""Variables that say where the key is, and for which server."""


def wandb_line(
    config: WandbConfig, *, environment: Mapping[str, str], home: Path, is_installed: bool
) -> tuple[str, list[str]]:
    """Value and problems. Reads files in `home`, to which `wandb login` writes, and in the start directory."""
    if config.mode == "disabled":
        return "disabled", []
    if not is_installed:
        return config.mode, ["the package wandb is missing; install it or set `wandb.mode` = disabled"]
    if config.mode == "online" and not _has_key(environment, home):
        return config.mode, ["no key; set WANDB_API_KEY, run `wandb login`, or set `wandb.mode` = offline"]
    return config.mode, []


def is_wandb_installed() -> bool:
    """Whether the package can be imported."""
    return find_spec("wandb") is not None


def run_problems(config: WandbConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Problems of a run whose controller has `environment`, in the home directory of this process."""
    mode, problems = wandb_line(config, environment=environment, home=Path.home(), is_installed=is_wandb_installed())
    return [f"`wandb.mode` = {mode}: {problem}" for problem in problems]


def job_problems(config: WandbConfig, slurm: SlurmConfig) -> tuple[list[str], list[str]]:
    """Problems and warnings of a job that is submitted from this shell.

    Only what is certain is a problem: neither this shell nor the job has a key, and nothing else may bring one. The job
    receives the listed variables, but the user's profile may set others there. So a key that is not listed is worth a
    warning only.
    """
    if brings_variables(slurm):
        return [], []
    listed = (*ALWAYS_EXPORTED, *slurm.environment)
    if not run_problems(config, {name: value for name, value in os.environ.items() if name in listed}):
        return [], []
    if problems := run_problems(config):
        return problems, []
    missing = [name for name in (*KEYS, *PLACES) if os.environ.get(name) and name not in listed]
    return [], [
        f"`wandb.mode` = {config.mode}: the job may lack the key of this shell; name {', '.join(missing)} in "
        "`cluster.slurm.environment`"
    ]


def _has_key(environment: Mapping[str, str], home: Path) -> bool:
    settings = _settings(environment, home)
    if any(environment.get(name) for name in KEYS) or settings.get("api_key"):
        return True
    url = environment.get("WANDB_BASE_URL") or settings.get("base_url") or f"https://{HOSTS[0]}"
    host = url.partition("://")[2].partition("/")[0]
    hosts = HOSTS if host in HOSTS else (host,)
    named = environment.get("NETRC")
    files = [Path(named).expanduser()] if named else [home / ".netrc", home / "_netrc"]
    return any(_has_login(file, hosts) for file in files)


def _has_login(file: Path, hosts: tuple[str, ...]) -> bool:
    try:
        logins = netrc.netrc(file)
    except (OSError, ValueError, netrc.NetrcParseError):
        return False
    return any(logins.authenticators(host) is not None for host in hosts)


def _settings(environment: Mapping[str, str], home: Path) -> Mapping[str, str]:
    """Settings of the user and of the start directory, which `wandb login --host` and `wandb init` write."""
    user = Path(environment.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb").expanduser()
    start = Path(environment.get("WANDB_DIR") or ".")
    found: dict[str, str] = {}
    for file in (user / "settings", start / "wandb" / "settings", start / ".wandb" / "settings"):
        parser = configparser.RawConfigParser()
        try:
            parser.read(file, encoding="utf-8")
        except (OSError, ValueError, configparser.Error):  # wandb goes on without such a file
            continue
        if parser.has_section("default"):
            found |= parser.items("default")
    return found
