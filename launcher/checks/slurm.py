"""Values of `cluster.slurm` that SLURM or the shell would misread.

Each sentence names the value, the bound and the fix.
"""

import ipaddress
import re
from collections.abc import Sequence

from launcher.cluster.slurm_script import gres_gpus
from launcher.config.slurm import ContainerConfig, SlurmConfig

_TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
_WORD = re.compile(r"[\w.,:@%+\-\[\]|&()*!/=]+")
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_INTERFACE = re.compile(r"[\w.\-]{1,15}")
_RENDERED = {
    **{"--nodes": "nodes", "--cpus-per-task": "cpus_per_node"},
    **{"--partition": "partition", "--account": "account", "--qos": "qos", "--time": "time"},
    **{"--constraint": "constraint", "--exclude": "exclude", "--job-name": "job_name", "--export": "environment"},
    **{
        "--signal": "stop_before_s",
        "--requeue": "",
        "--no-requeue": "",
        "--no-kill": "",
        "--output": "",
        "--open-mode": "",
    },
    **{"--ntasks-per-node": "", "--ntasks": "", "--array": ""},
}
"""Options that the script sets itself, and the key that changes them; empty where nothing does."""
_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-socket", "--gpus-per-task")
"""Options that request GPUs. SLURM refuses a type beside the script's own request, and may share a total unevenly."""
_SHORT = {
    **{"-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-G": "--gpus", "-t": "--time", "-a": "--array"},
    **{"-p": "--partition", "-A": "--account", "-q": "--qos", "-C": "--constraint", "-x": "--exclude"},
    **{"-J": "--job-name", "-o": "--output", "-k": "--no-kill"},
}
"""Short forms of all these options."""


def slurm_problems(slurm: SlurmConfig) -> list[str]:
    """Problems of `cluster.slurm`, a sentence each."""
    return [
        *_words(slurm),
        *_time(slurm),
        *[problem for line in slurm.extra for problem in _extra(line)],
        *_gres(slurm),
        *_names(slurm),
        *_addresses(slurm),
        *_container(slurm.container),
    ]


def _words(slurm: SlurmConfig) -> list[str]:
    words = {
        name: getattr(slurm, name) for name in ("partition", "account", "qos", "constraint", "exclude", "job_name")
    }
    return [
        f"`cluster.slurm.{name}` = {value!r} has blanks or quotes; write one word of letters, digits and SLURM's signs"
        for name, value in words.items()
        if value and not _WORD.fullmatch(value)
    ]


def _time(slurm: SlurmConfig) -> list[str]:
    if not slurm.time:
        return []
    if not _TIME.fullmatch(slurm.time):
        return [
            f"`cluster.slurm.time` = {slurm.time!r} is no time limit of SLURM; write MINUTES, HOURS:MINUTES:SECONDS, "
            "DAYS-HOURS or DAYS-HOURS:MINUTES:SECONDS"
        ]
    limit_s = time_limit_s(slurm.time)
    if slurm.stop_before_s >= limit_s:
        return [
            f"`cluster.slurm.stop_before_s` = {slurm.stop_before_s} is not below the time limit of {limit_s} s "
            f"(`cluster.slurm.time` = {slurm.time}); lower it or raise the time limit"
        ]
    return []


def time_limit_s(text: str) -> int:
    """Seconds of a time limit that `slurm_problems` has accepted."""
    days, dash, rest = text.rpartition("-")
    fields = [int(field) for field in rest.split(":")]
    if dash:  # DAYS-HOURS[:MINUTES[:SECONDS]]
        hours, minutes, seconds = (*fields, 0, 0)[:3]
    elif len(fields) == 3:
        hours, minutes, seconds = fields
    else:  # MINUTES[:SECONDS]
        hours, (minutes, seconds) = 0, (*fields, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _extra(line: str) -> list[str]:
    key = f"`cluster.slurm.extra` = {line!r}"
    if not re.fullmatch(r"--?[a-zA-Z][^\n]*", line):
        return [
            f"{key} is no option of sbatch; write it with its dashes and on one line, for example `--mail-type=END`"
        ]
    option = re.split(r"[=\s]", line)[0] if line.startswith("--") else _SHORT.get(line[:2], line[:2])
    if option in _GPUS:
        return [f"{key}: set `cluster.slurm.gpus_per_node`, and name a type of GPUs by `--gres=gpu:TYPE:COUNT`"]
    if option in _RENDERED:
        named = _RENDERED[option]
        fix = f"set `cluster.slurm.{named}`" if named else "copy the template and set `cluster.slurm.template`"
        return [f"{key}: the script sets {option} itself; {fix}"]
    # sbatch completes the beginning of an option's name; no option has a name that begins one of these
    if begun := [name for name in (*_RENDERED, *_GPUS) if option.startswith("--") and name.startswith(option)]:
        return [f"{key}: sbatch may read {option} as {' or '.join(begun)}; write the option's whole name"]
    return []


def _gres(slurm: SlurmConfig) -> list[str]:
    requested = gres_gpus(slurm.extra)
    if requested is None or requested == slurm.gpus_per_node:
        return []
    return [
        f"`cluster.slurm.extra` requests {requested} GPU(s) of each node by --gres, but `cluster.slurm.gpus_per_node` "
        f"= {slurm.gpus_per_node}; set both to one number"
    ]


def variable_names(key: str, names: Sequence[str]) -> list[str]:
    """Problems of names of variables; those of a job stand in its script, which must hold no value."""
    return [
        f"`{key}` = {name!r} is no variable name; give names only, values come from the shell"
        for name in names
        if not _VARIABLE.fullmatch(name)
    ]


def _names(slurm: SlurmConfig) -> list[str]:
    return variable_names("cluster.slurm.environment", slurm.environment) + [
        f"`cluster.slurm.modules` = {name!r} is not one word; give one module per entry"
        for name in slurm.modules
        if not _WORD.fullmatch(name)
    ]


def _addresses(slurm: SlurmConfig) -> list[str]:
    found = []
    if slurm.interface and not _INTERFACE.fullmatch(slurm.interface):
        found.append(
            f"`cluster.slurm.interface` = {slurm.interface!r} is no interface name of at most 15 characters; "
            "`ip -br address` lists them"
        )
    for node, address in slurm.addresses.items():
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            found.append(f"`cluster.slurm.addresses.{node}` = {address!r} is no IPv4 address; write it as 10.0.0.7")
    return found


def _container(container: ContainerConfig) -> list[str]:
    found = []
    if container.kind == "none" and (container.image or container.mounts):
        found.append("`cluster.slurm.container.kind` = none with an image or mounts; set kind to pyxis or apptainer")
    if container.kind != "none" and not container.image:
        found.append(f"`cluster.slurm.container.kind` = {container.kind} without an image; set `container.image`")
    found += [
        f"`cluster.slurm.container.mounts` = {mount!r} is not SOURCE:TARGET with absolute paths"
        for mount in container.mounts
        if not re.fullmatch(r"/[^:\n]*:/[^:\n]*(:[\w,\-]+)?", mount)
    ]
    return found
