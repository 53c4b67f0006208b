"""The command line: `megatron-rl COMMAND ...`; `megatron-rl --help` lists the commands.

It parses arguments, then loads and checks the configuration, and imports the heavy modules last: `--help` and every
refusal take a fraction of a second. Every failed command prints one screen and returns the exit code of its kind
(`launcher.endings.kinds`); the full traceback goes to a log.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.checks.check import check_eval, check_run, check_sft
from launcher.checks.expected_nodes import expected_nodes, unknown_gpu_warnings
from launcher.checks.health.cpu_packages import machine_problems
from launcher.checks.health.reward_environment import job_reward_problems, reward_problems
from launcher.checks.health.wandb import job_problems, run_problems
from launcher.cluster.node import NodeResources, node_resources
from launcher.cluster.slurm_step import has_several_tasks
from launcher.commands.plan import add_plan_options, plan, plan_options
from launcher.commands.slurm import check_resume, dry_run_lines, job_config, prepare, submit
from launcher.config.loading import load, resolved_yaml
from launcher.config.schema import ClusterConfig, EvalConfig, ExportConfig, RunConfig, SftConfig
from launcher.endings.conclusion import Command, conclude, leave, termination_raises
from launcher.endings.screen import exit_codes
from launcher.errors import ConfigError, RunDirectoryError, Terminated
from launcher.run_dir.status import read_now, status_lines
from launcher.run_dir.stop_request import write_request

RAY_MESSAGES = "^A worker died or was killed"
"""Messages of Ray that are not printed: the screen of a failed command says the same, and the log has the reason."""
OVERRIDES = "Overrides are dotted keys with YAML values: `trainer.optimizer.learning_rate=1e-5 seed=3`."

WITHOUT_OVERRIDES = ("status", "stop", "report", "dashboard")
"""Commands without a configuration."""
EXPORT_PLACE = (
    "It runs on this machine, with one replica of the run's tensor and pipeline ranks. Overrides of `trainer.` and "
    "`cluster.` change that: `trainer.parallel.pipeline=1`, `cluster.address=auto`."
)
EXPORT_KEYS = ("trainer.", "cluster.")
"""Beginnings of the keys of a run that an export may replace."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_MESSAGES)  # read by the import of ray, which comes later
    arguments = _parse(list(sys.argv[1:] if argv is None else argv))
    command = Command(name=arguments.command)
    try:
        with termination_raises():
            code = _dispatch(arguments, command)
    except (Exception, KeyboardInterrupt, Terminated) as error:  # every error ends as a screen and an exit code
        code = conclude(error, command)
    return leave(code)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parses `argv`; overrides may come before or after options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or "=" not in text]
    if unknown or (rest and arguments.command in WITHOUT_OVERRIDES):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)} (an override is key=value)")
    if arguments.command not in WITHOUT_OVERRIDES:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-rl",
        description="Reinforcement learning for language models with quantised rollouts.",
        epilog=exit_codes(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = _command(commands, "run", "reinforcement learning; resumes when the run directory holds a checkpoint")
    run.add_argument("--dry-run", action="store_true", help="print configuration, placement and memory; start nothing")
    slurm = _command(commands, "slurm", "submits a run as a SLURM job; resumes like `run`")
    slurm.add_argument(
        "--dry-run", action="store_true", help="print batch script, placement and memory; submit nothing"
    )
    add_plan_options(_command(commands, "plan", "memory by phase and an estimate of time, from files alone"))
    doctor = _command(commands, "doctor", "checks of nodes, data, reward, tokenizer and disk before a long run")
    doctor.add_argument(
        "--log-probabilities",
        action="store_true",
        help="start trainer and engines, and compare their log-probabilities with Hugging Face's",
    )
    for name, text in {
        "status": "what a run does now, from files in its directory",
        "stop": "asks a run to save a checkpoint and end",
    }.items():
        commands.add_parser(name, help=text).add_argument("run_dir", help="run directory")
    report = commands.add_parser("report", help="report.html of a run, or a comparison of several runs")
    report.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="run directory; several are compared")
    report.add_argument("--output", default="comparison.html", help="file of a comparison (default: %(default)s)")
    dashboard = commands.add_parser("dashboard", help="all panels as one page, or as a wandb workspace")
    dashboard.add_argument("run_dirs", nargs="*", metavar="RUN_DIR", help="run directory; a line for each run")
    dashboard.add_argument("--output", default="dashboard.html", help="file of the page (default: %(default)s)")
    dashboard.add_argument("--wandb", default="", metavar="ENTITY/PROJECT", help="save the panels as a workspace there")
    _command(commands, "eval", "avg@k and pass@k of a Hugging Face directory")
    sft = _command(commands, "sft", "supervised warm start, Hugging Face directory to Hugging Face directory")
    sft.add_argument("--dry-run", action="store_true", help="print configuration and memory; start nothing")
    text = "a checkpoint as a Hugging Face directory"
    export = commands.add_parser("export", help=text, description=f"{text}. {EXPORT_PLACE}")
    export.add_argument("run_dir", help="run directory that holds the checkpoint")
    export.add_argument("output_dir", help="Hugging Face directory to write")
    export.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="replaces keys of the run")
    export.add_argument("--step", type=int, default=-1, help="checkpoint of this step (default: that of a resume)")
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    """Adds a command with a configuration file and overrides."""
    command = commands.add_parser(name, help=text, description=f"{text}. {OVERRIDES}")
    command.add_argument("config", metavar="CONFIG", help="YAML file; keys: docs/configuration.md")
    command.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="replaces keys of CONFIG")
    return command


def _dispatch(arguments: argparse.Namespace, command: Command) -> int:
    if arguments.command == "run":
        return _run(arguments.config, arguments.overrides, command, dry_run=arguments.dry_run)
    if arguments.command == "slurm":
        return _slurm(arguments.config, arguments.overrides, command, dry_run=arguments.dry_run)
    if arguments.command == "plan":
        return plan(load(RunConfig, arguments.config, arguments.overrides), plan_options(arguments))
    if arguments.command == "doctor":
        return _doctor(arguments.config, arguments.overrides, log_probabilities=arguments.log_probabilities)
    if arguments.command == "status":
        print("\n".join(status_lines(Path(arguments.run_dir), now_s=time.time())))
        return 0
    if arguments.command == "stop":
        return _stop(Path(arguments.run_dir))
    if arguments.command == "report":
        return _report([Path(run_dir) for run_dir in arguments.run_dirs], Path(arguments.output))
    if arguments.command == "dashboard":
        return _dashboard([Path(run_dir) for run_dir in arguments.run_dirs], Path(arguments.output), arguments.wandb)
    if arguments.command == "eval":
        return _eval(arguments.config, arguments.overrides, command)
    if arguments.command == "sft":
        return _sft(arguments.config, arguments.overrides, command, dry_run=arguments.dry_run)
    return _export(arguments, command)


def _run(path: str, overrides: Sequence[str], command: Command, *, dry_run: bool) -> int:
    config = load(RunConfig, path, overrides)
    command.run_dir = Path(config.run_dir)
    if has_several_tasks() and config.cluster.address == "local" and not dry_run:
        from launcher.commands.srun_run import run_as_task

        return run_as_task(config)
    found = [*run_problems(config.wandb), *reward_problems(config.reward, config.cluster)]
    found += machine_problems(config.cluster)
    checked = check_run(config, _nodes(config.cluster), found)
    for warning in checked.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        print(resolved_yaml(config))
        lines = ["# placement", *checked.placement.lines(), "", "# memory (estimate)", *checked.memory.lines()]
        print("\n".join(lines))
        return 0
    from launcher.commands.run import run

    run(checked, command)
    return 0


def _nodes(cluster: ClusterConfig) -> tuple[NodeResources, ...]:
    """Nodes that a command may use; asks a running Ray cluster for its nodes."""
    if cluster.address == "local":
        return (node_resources(),)
    from launcher.cluster.ray_cluster import joined_nodes

    return joined_nodes(cluster)


def _slurm(path: str, overrides: Sequence[str], command: Command, *, dry_run: bool) -> int:
    config = job_config(load(RunConfig, path, overrides))
    command.run_dir = Path(config.run_dir)
    slurm = config.cluster.slurm
    for warning in unknown_gpu_warnings(slurm):  # before a refusal, which may follow from it
        print(f"warning: {warning}", file=sys.stderr)
    key_problems, key_warnings = job_problems(config.wandb, slurm)
    found = [*key_problems, *job_reward_problems(config.reward, slurm)]
    nodes, in_container = expected_nodes(slurm, node_resources()), slurm.container.kind != "none"
    checked = check_run(config, nodes, found, in_container=in_container)
    for warning in (*checked.warnings, *key_warnings):
        print(f"warning: {warning}", file=sys.stderr)
    check_resume(config)
    submission, script = prepare(config)
    print("\n".join(dry_run_lines(checked, script) if dry_run else submit(config, submission, script)))
    return 0


def _doctor(path: str, overrides: Sequence[str], *, log_probabilities: bool) -> int:
    config = load(RunConfig, path, overrides)
    from launcher.doctor.command import doctor

    return doctor(config, _nodes(config.cluster) if log_probabilities else ())


def _stop(run_dir: Path) -> int:
    now = read_now(run_dir)
    if now is None or now.phase == "ended":
        raise RunDirectoryError(f"`{run_dir}`: no run is under way there; `megatron-rl status` tells what it holds")
    write_request(run_dir, reason="megatron-rl stop")
    print("the run saves a checkpoint and ends, in a rollout at once, else after the step; see `megatron-rl status`")
    return 0


def _report(run_dirs: list[Path], output: Path) -> int:
    from launcher.report.dashboard import write_comparison
    from launcher.report.write import write_report

    try:
        print(write_report(run_dirs[0]) if len(run_dirs) == 1 else write_comparison(run_dirs, output))
    except FileNotFoundError as error:
        raise RunDirectoryError(str(error)) from error
    return 0


def _dashboard(run_dirs: list[Path], output: Path, workspace: str) -> int:
    if not run_dirs and not workspace:
        raise ConfigError("name a RUN_DIR, or the wandb project with --wandb ENTITY/PROJECT")
    from launcher.report.dashboard import write_dashboard
    from launcher.report.wandb_workspace import save_workspace

    try:
        if run_dirs:
            print(write_dashboard(run_dirs, output))
    except FileNotFoundError as error:
        raise RunDirectoryError(str(error)) from error
    if workspace:
        print(save_workspace(workspace))
    return 0


def _eval(path: str, overrides: Sequence[str], command: Command) -> int:
    config = load(EvalConfig, path, overrides)
    command.output = Path(config.output) if config.output else None
    check_eval(config, [*reward_problems(config.reward, config.cluster), *machine_problems(config.cluster)])
    from launcher.commands.evaluate import evaluate

    evaluate(config, _nodes(config.cluster))
    return 0


def _sft(path: str, overrides: Sequence[str], command: Command, *, dry_run: bool) -> int:
    config = load(SftConfig, path, overrides)
    command.output = Path(config.log_path or config.output_dir)
    checked = check_sft(config, _nodes(config.cluster), machine_problems(config.cluster))
    for warning in checked.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if dry_run:
        print(resolved_yaml(config))
        print("\n".join(["# memory (estimate)", *checked.memory.lines()]))
        return 0
    from launcher.commands.sft import sft

    sft(checked)
    return 0


def _export(arguments: argparse.Namespace, command: Command) -> int:
    if arguments.step < -1:
        raise ConfigError(f"--step = {arguments.step}: checkpoints are numbered from 0; -1 is that of a resume")
    if wrong := [override for override in arguments.overrides if not override.startswith(EXPORT_KEYS)]:
        raise ConfigError(
            f"override `{wrong[0]}`: an export takes keys of `trainer.` and `cluster.` only, because the others are "
            "those of the run; remove it"
        )
    config = ExportConfig(
        run_dir=arguments.run_dir,
        output_dir=arguments.output_dir,
        step=arguments.step,
        overrides=tuple(arguments.overrides),
    )
    command.run_dir = Path(config.run_dir)
    from launcher.commands.export import export

    export(config)
    return 0
